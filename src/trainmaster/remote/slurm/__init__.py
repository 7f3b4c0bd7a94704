"""Node half of the slurm target.

login.py       requests where Slurm's commands are      commands.py   Slurm's programs, and what a failure means
node_start.py  what srun starts on each node            parse.py      squeue, sacct and sbatch, text and JSON
layout.py      folders on the shared disk               states.py     Slurm's states and reasons in our words
"""

#!/bin/bash
# Acceptance training where Trainmaster is installed on the nodes: one task per GPU, no container.
# First: mkdir -p results
#SBATCH --job-name=gpu-acceptance
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --output=results/acceptance-%j.out

srun trainmaster accept --batch-size 64 --out "results/acceptance-$SLURM_JOB_ID.json"

"""What the control half starts on a machine: imports core only, standard library only.

bootstrap.py    first program on a node, sent as text      node_server.py      node end of the ssh target
package.py      the node half as one file or folder        attempt_host.py     attempts of this machine
files.py        files and commands of a node               owned.py            processes of attempts
data.py         node end of bulk data                      job_user.py         environment and Unix user of jobs
pull.py         objects pulled by the node itself          slurm/              login node and compute nodes of Slurm
transfer.py     trees of files in units, both ends         sagemaker_start.py  first program of a SageMaker container
frames.py       requests and bytes on a channel            framed_lines.py     files as lines of a container's log
"""

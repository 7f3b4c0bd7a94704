#!/bin/bash
#SBATCH --job-name=gpu-acceptance
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=acceptance-%j.out

module load singularity

# Once: singularity pull docker://gpu_cluster_testing:latest
srun singularity exec --nv \
  gpu_cluster_testing_latest.sif \
  /workspace/scripts/entrypoint.sh \
  --batch-size 64

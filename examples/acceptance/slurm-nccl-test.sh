#!/bin/bash
# NCCL bandwidth: NVLink, forced network, several nodes, latency.
# First: mkdir -p results. Follow it with: tail -f results/nccl_bandwidth_*.out
#SBATCH --job-name=nccl-bandwidth
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:30:00
#SBATCH --output=results/nccl_bandwidth_%j.out

out=results/nccl_bandwidth_$SLURM_JOB_ID
worst=0 # 1 is FAIL
keep() { [ "$worst" -eq 1 ] || worst=$1; }
measure() { # NAME WORDS...
  echo "== $1"
  srun "${@:2}" --out "$out/$1" || keep $?
}

measure nvlink --nodes=1 --ntasks=8 trainmaster bandwidth --collective all_reduce
(
  export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_ALGO=Ring
  measure network --nodes=1 --ntasks=8 trainmaster bandwidth --collective all_reduce
  exit "$worst"
) || keep $?
measure nodes trainmaster bandwidth --collective all_reduce
measure latency trainmaster bandwidth --collective all_reduce --min 1K --max 8K
exit "$worst"

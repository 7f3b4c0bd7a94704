#!/bin/bash
# Acceptance training with containers on bare metal. Run it on every machine:
#
#   bare-metal.sh MASTER_ADDR WORLD_SIZE FIRST_RANK      the second machine with 8 GPUs of 16 has FIRST_RANK 8
#
set -euo pipefail
: "${2:?usage: bare-metal.sh MASTER_ADDR WORLD_SIZE FIRST_RANK}"
MASTER_ADDR=$1 WORLD_SIZE=$2 FIRST_RANK=${3:-0}
MASTER_PORT=${MASTER_PORT:-29500}
GPUS=${GPUS:-8}
started=()

for ((i = 0; i < GPUS; i++)); do
  docker run --gpus "device=$i" --rm --ipc=host --network=host \
    -e MASTER_ADDR="$MASTER_ADDR" \
    -e MASTER_PORT="$MASTER_PORT" \
    -e WORLD_SIZE="$WORLD_SIZE" \
    -e RANK=$((FIRST_RANK + i)) \
    -e LOCAL_RANK="$i" \
    -e NCCL_SOCKET_IFNAME \
    gpu_cluster_testing:latest \
    --batch-size 64 &
  started+=($!)
done
worst=0 # 1 is FAIL
for process in "${started[@]}"; do
  wait "$process" || { code=$? && [ "$worst" -eq 1 ] || worst=$code; }
done
exit "$worst"

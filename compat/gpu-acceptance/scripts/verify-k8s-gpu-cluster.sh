#!/bin/sh
# GPU nodes of a Kubernetes cluster: their GPUs, labels and taints, and whether NVIDIA's device plugin runs.
# Ends with 1 where no node offers a GPU.
set -eu
columns='NODE:.metadata.name,GPUS:.status.allocatable.nvidia\.com/gpu,ACCELERATOR:.metadata.labels.accelerator'
nodes=$(kubectl get nodes -o custom-columns="$columns,TAINTS:.spec.taints[*].key")
echo "$nodes"
echo
pods=$(kubectl get pods --all-namespaces -o custom-columns='POD:.metadata.name,STATUS:.status.phase')
echo "$pods" | grep -i nvidia || echo "no pod with nvidia in its name: is the device plugin installed?"
found=$(echo "$nodes" | awk 'NR > 1 && $2 != "<none>" && $2 > 0' | wc -l)
if [ "$found" -eq 0 ]; then
    echo "no node offers nvidia.com/gpu" >&2
    exit 1
fi
echo "$found nodes offer GPUs"

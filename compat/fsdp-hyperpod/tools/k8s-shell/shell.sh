#!/bin/sh
# A shell or a command in a pod of a training job. The same as: trainmaster cluster shell
#   tools/k8s-shell/shell.sh --on hyperpod:cluster.yaml --rank 8 -- nvidia-smi
own=$(dirname "$(realpath "$0")")/../../../../.venv/bin/trainmaster
[ -x "$own" ] || own=trainmaster
exec "$own" cluster shell "$@"

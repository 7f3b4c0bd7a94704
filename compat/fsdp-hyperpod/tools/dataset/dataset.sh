#!/bin/sh
# Datasets: fetch, tokenise, pack and check them. The same as: trainmaster data
#   tools/dataset/dataset.sh prepare --help
own=$(dirname "$(realpath "$0")")/../../../../.venv/bin/trainmaster
[ -x "$own" ] || own=trainmaster
exec "$own" data "$@"

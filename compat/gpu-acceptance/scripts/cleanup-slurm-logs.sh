#!/bin/sh
# Delete old output of acceptance tests:  cleanup-slurm-logs.sh [DIR] [DAYS]      (./results, and older than 7 days)
# Only files and folders that examples/ writes there: acceptance-*, nccl_bandwidth_*.
set -eu
folder=${1:-./results}
days=${2:-7}
case $days in '' | *[!0-9]*) echo "usage: $0 [DIR] [DAYS]" >&2 && exit 2 ;; esac
[ -d "$folder" ] || { echo "$folder: there is no such folder" >&2 && exit 2; }
find "$folder" -mindepth 1 -maxdepth 1 \( -name 'acceptance-*' -o -name 'nccl_bandwidth_*' \) -mtime "+$days" \
    -print -exec rm -r {} +

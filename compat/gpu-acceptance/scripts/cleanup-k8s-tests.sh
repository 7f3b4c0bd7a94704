#!/bin/sh
# Delete finished acceptance tests:  cleanup-k8s-tests.sh [NAMESPACE] [HOURS]      (default, and older than 24 hours)
# Only PyTorchJobs with the label app=gpu-acceptance-test, and only finished ones.
set -eu
namespace=${1:-default}
hours=${2:-24}
case $hours in '' | *[!0-9]*) echo "usage: $0 [NAMESPACE] [HOURS]" >&2 && exit 2 ;; esac
limit=$(($(date +%s) - hours * 3600))
# Not in the pipe: its status there would be lost, and a cluster that does not answer would look clean.
found=$(kubectl get pytorchjobs --namespace "$namespace" --selector app=gpu-acceptance-test \
    --output jsonpath='{range .items[*]}{.metadata.name} {.status.completionTime}{"\n"}{end}')
echo "$found" | while read -r name finished; do
    [ -n "$finished" ] || continue
    [ "$(date --date "$finished" +%s)" -gt "$limit" ] || kubectl delete pytorchjob --namespace "$namespace" "$name"
done

#!/usr/bin/env bash
# Check this node in a pipeline and compare it with the last healthy run:  check.sh HISTORY [OPTIONS of trainmaster check]
#
#   HISTORY  a folder that outlives the pipeline; each run gets a folder of its own in it, `healthy` links to the last
#            one that passed
#
# Writes junit.xml and report.html into the run's folder and prints its path last. Exit code: that of the check (0 PASS or
# WARN, 1 FAIL, 3 INCOMPLETE).
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: $0 HISTORY [OPTIONS of trainmaster check]" >&2
    exit 2
fi
history=$1
shift
mkdir -p "$history"
run=$history/$(date -u +%Y%m%dT%H%M%SZ)-$$
before=()
[ -e "$history/healthy" ] && before=(--diff "$history/healthy")

code=0
"${TRAINMASTER:-trainmaster}" check --out "$run" ${before[@]+"${before[@]}"} "$@" || code=$?
# After the check: a run that failed must not become what later runs are compared with.
[ "$code" -ne 0 ] || ln -sfn "$(basename "$run")" "$history/healthy"
echo "$run"
exit "$code"

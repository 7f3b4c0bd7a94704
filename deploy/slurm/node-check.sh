#!/bin/sh
# Prolog, Epilog or HealthCheckProgram of slurm.conf: check this node, and drain it with the reason where a check FAILS.
#
#   Prolog=/etc/slurm/node-check.sh                     before each job; it then starts on other nodes
#   SchedulerParameters=nohold_on_prolog_fail           without it Slurm holds the job whose prolog failed
#
# /etc/trainmaster/node-check.conf may set PYTHON (with Trainmaster installed) and CHECKS (options of the checks).
# A node is drained because it failed, never because something could not be measured: then the job may start, and the
# pre-flight of its own spec decides.
set -u
PYTHON=/opt/trainmaster/bin/python
CHECKS="--level 1"
CONF="${NODE_CHECK_CONF:-/etc/trainmaster/node-check.conf}"
# shellcheck disable=SC1090
[ -r "$CONF" ] && . "$CONF"

# shellcheck disable=SC2086
found=$("$PYTHON" -m trainmaster.checks $CHECKS 2>&1)
code=$?
[ "$code" -eq 1 ] || exit 0
failed=$(printf '%s\n' "$found" | sed -n 's/^fail  *//p' | sed 's/ -> .*//; s/["`$\\]//g; s/  */ /g' | head -n 1)
[ -n "$failed" ] || exit 0
since=$(date -u +%Y-%m-%dT%H:%M:%S+00:00)
reason=$(printf 'trainmaster: %s' "$failed" | cut -c 1-180)
node="${SLURMD_NODENAME:-$(hostname -s)}"
scontrol update "nodename=$node" state=drain "reason=$reason (since $since)"
echo "node-check: $node drained: $reason" >&2
exit 1

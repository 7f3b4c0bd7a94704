#!/bin/sh
# Install what the tests need from the system: Chromium, for the pages and the report, an SSH server,
# for the targets and checks that reach other machines, Slurm, for draining nodes, and PostgreSQL, for the store. Where we may not, say so:
# the tests that need it are then skipped, each with its reason.
set -u
missing=""
for pair in "chromium:chromium" "/usr/share/fonts/truetype/liberation:fonts-liberation" \
    "/usr/sbin/slurmctld:slurm-wlm" "/usr/sbin/munged:munge" \
    "/usr/sbin/sshd:openssh-server" "/usr/lib/postgresql:postgresql"; do
    probe=${pair%%:*}
    command -v "$probe" >/dev/null 2>&1 || [ -e "$probe" ] || missing="$missing ${pair#*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null; then exit 0; fi
fi
echo "not installed:$missing (needs root and apt); the tests that use it are skipped"

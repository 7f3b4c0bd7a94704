#!/bin/sh
# Make the base of the images that `make images` builds, once: Debian 12 with Python 3.11 and torch for CPUs, where no
# registry can be reached. $1, or ~/.cache/trainmaster/images, gets base.tar (a root file system for `podman import`) and
# wheels/, all that pip needs inside the builds: the index and the certificates of this machine need not be there.
# Needs root, debootstrap, and a Python 3.11 with pip ($PYTHON), whose wheels fit Debian's. About 2 GB.
set -eu

KEEP=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/trainmaster/images}
PYTHON=${PYTHON:-python3}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PACKAGES=python3,python3-venv,python3-pip,ca-certificates

if [ -e "$KEEP/base.tar" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "the base of the images needs root and debootstrap" >&2
    exit 3
fi
if ! "$PYTHON" -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))'; then
    echo "the base of the images needs Python 3.11 with pip, as Debian 12 has it (PYTHON=…)" >&2
    exit 3
fi

WORK=$(mktemp -d "${TMPDIR:-/tmp}/build-base-image.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)
debootstrap --variant=minbase --include="$PACKAGES" bookworm "$WORK/root" "${mirror:-http://deb.debian.org/debian}" \
    >"$WORK/debootstrap.log" 2>&1 || { tail -n 5 "$WORK/debootstrap.log" >&2; exit 1; }
# psutil is what the stage `sagemaker` installs besides; hatchling builds the package.
"$PYTHON" -m pip download --quiet --constraint "$ROOT/constraints.txt" --dest "$WORK/wheels" \
    torch numpy psutil hatchling "$ROOT[images,server,storage]"
mv "$WORK/wheels" "$WORK/root/wheels"
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$WORK/root/etc/pip.conf"
# As the images of NVIDIA and Amazon: what pip installs belongs to the system's Python.
rm -f "$WORK/root/usr/lib/python3.11/EXTERNALLY-MANAGED"
# Without this machine's own settings of pip, which may name folders that are not inside.
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$WORK/root" \
    python3 -m pip install --quiet --no-cache-dir --root-user-action=ignore torch numpy
rm -rf "$WORK/root/var/cache/apt" "$WORK/root/var/lib/apt/lists"
mkdir -p "$KEEP"
rm -rf "$KEEP/wheels"
mv "$WORK/root/wheels" "$KEEP/wheels"
mkdir "$WORK/root/wheels"
tar -C "$WORK/root" -cf "$WORK/base.tar" .
# Moved last: who sees it may trust the wheels beside it.
mv "$WORK/base.tar" "$KEEP/base.tar"

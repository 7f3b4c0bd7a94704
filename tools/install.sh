#!/bin/sh
# Install this clone into a virtual environment: `sh tools/install.sh .venv/bin EXTRAS [PACKAGE_ALONE...]`. The
# environment is made where it is not there, is not whole or its Python is gone; PYTHON names the one to make it with.
# torch comes by pip, which takes the build that this machine's own settings name, and uv keeps what is there. The rest
# comes by uv: pip reads every link of every index page, a minute and a half for all extras; uv needs seconds.
# Where uv is missing for this platform, or cannot reach an index that only pip's settings name, pip does it all.
# Bytecode is written by the first import: most of 20,000 files are never imported.
# A PACKAGE_ALONE comes without what it depends on.
set -eu
bin=$1 extras=$2
shift 2
folder=${bin%/bin} python=${PYTHON:-python3}

# What is installed goes into this environment, wherever the shell or pip's own settings send other packages, and what
# lies on PYTHONPATH (module systems of clusters set it) does not count as installed.
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_DRY_RUN PIP_REQUIRE_HASHES PYTHONHOME PYTHONPATH
export PIP_USER=0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trainmaster needs Python 3.11 or newer, and "
    + sys.executable + " is " + sys.version.split()[0] + ": make PYTHON=python3.12 names another")'

with_pip() {
    "$bin/python" -m pip install --disable-pip-version-check --no-compile "$@"
}

install() {
    [ -x "$bin/uv" ] && "$bin/uv" pip install --quiet --python "$bin/python" "$@" && return
    echo "installing by pip, which takes a minute or two more"
    with_pip --quiet "$@"
}

advise() {
    [ $? = 0 ] || cat >&2 <<ADVICE
the set-up of $folder failed, for the reason above; then run make again, which goes on or begins anew
  no network: export HTTPS_PROXY=http://PROXY:PORT, or PIP_INDEX_URL=https://MIRROR/simple
  no space left: export TMPDIR=/another/disk; the environment takes 2 GB, with CUDA's torch 8 GB
ADVICE
}
trap advise EXIT

# One at a time: a second make would take what the first has half done for what a killed one left, and remove it.
# The lock is the system's: it ends with the processes that hold it. Where the file system has none, none is taken.
lock='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | int(sys.argv[1]))'
exec 9>>"$folder.lock"
"$python" -c "$lock" 4 2>/dev/null || { # 4: LOCK_NB
    echo "waiting for another make that sets up $folder"
    "$python" -c "$lock" 0 || true
}

# Killed half way, pip and uv leave packages that lack files and that neither would install again. Programs of an
# environment that was moved or copied belong to the old place, and an older Python cannot run this package.
is_usable() {
    "$bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || return
    own=$("$bin/python" -m pip --version) && [ "$("$bin/pip" --version)" = "$own" ]
}
unfinished=$folder/.installing
if [ -e "$unfinished" ] || ! is_usable 2>/dev/null; then
    "$python" -m venv --clear "$folder"
fi
touch "$unfinished"
# Not quiet: torch is large, and its download is the sign of life.
with_pip -c constraints.txt torch numpy
with_pip --quiet -c constraints.txt uv || true
install -c constraints.txt -e ".[$extras]"
[ $# = 0 ] || install --no-deps "$@"
pwd -P >"$folder/.place"
rm "$unfinished"

#!/bin/sh
# Install this clone into a virtual environment: `sh tools/install.sh .venv/bin EXTRAS [PACKAGE_ALONE...]`.
# torch comes by pip, which takes the build that this machine's own settings name, and uv keeps what is there. The rest
# comes by uv: pip reads every link of every index page, a minute and a half for all extras; uv needs seconds.
# Where uv is missing for this platform, or cannot reach an index that only pip's settings name, pip does it all.
# Bytecode is written by the first import: most of 20,000 files are never imported.
# A PACKAGE_ALONE comes without what it depends on.
set -eu
bin=$1 extras=$2
shift 2

with_pip() {
    "$bin/pip" install --disable-pip-version-check --no-compile "$@"
}

install() {
    [ -x "$bin/uv" ] && "$bin/uv" pip install --quiet --python "$bin/python" "$@" && return
    echo "installing by pip, which takes a minute or two more"
    with_pip --quiet "$@"
}

# Killed half way, pip and uv leave packages that lack files and that neither would install again.
unfinished=$bin/../.installing
[ ! -e "$unfinished" ] || "$bin/python" -m venv --clear "$bin/.."
touch "$unfinished"
# Not quiet: torch is large, and its download is the sign of life.
with_pip -c constraints.txt torch numpy
with_pip --quiet -c constraints.txt uv || true
install -c constraints.txt -e ".[$extras]"
[ $# = 0 ] || install --no-deps "$@"
rm "$unfinished"

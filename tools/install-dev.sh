#!/bin/sh
# Install what the tests need into a virtual environment: `sh tools/install-dev.sh .venv/bin`.
# torch comes by pip, which takes the build that this machine's own settings name, and uv keeps what is there. The rest
# comes by uv: pip reads every link of every index page, a minute and a half for these packages; uv needs seconds.
# Where uv is missing for this platform, or cannot reach an index that only pip's settings name, pip does it all.
# Bytecode is written by the first import: compiling all 20,000 files takes longer than the tests that would use them.
set -eu
bin=$1

with_pip() {
    "$bin/pip" install --quiet --disable-pip-version-check --no-compile "$@"
}

with_uv() {
    "$bin/uv" pip install --quiet --no-progress --python "$bin/python" "$@"
}

install() {
    { [ -x "$bin/uv" ] && with_uv "$@"; } || with_pip "$@"
}

with_pip -c constraints.txt torch numpy uv || with_pip -c constraints.txt torch numpy
# HyperPod's own log agent judges our heartbeat lines in a test. Its package pins another torch, so it comes alone.
agent='hyperpod-elastic-agent==1.1.3'
install -c constraints.txt -e '.[dev]'
install --no-deps "$agent"
# torch is compiled here, by all cores: ranks of other accounts could not keep its bytecode.
"$bin/python" -m compileall -qq -j 0 "$bin"/../lib/python3.*/site-packages/torch || true

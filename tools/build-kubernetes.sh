#!/bin/sh
# Build Kubernetes 1.20.2 from Debian's source package for the tests, once: about 8 minutes on two cores, 350 MB kept.
# The programs go to $1, or to ~/.cache/trainmaster/k8s-1.20.2, where tests/kube.py finds them. Debian carries no newer
# version with its server. Needs root for the build packages; nothing else of the system is changed.
set -eu

VERSION=1.20.2
KEEP=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/trainmaster/k8s-$VERSION}
PROGRAMS="kube-apiserver kube-controller-manager kube-scheduler kubelet"

complete() { for name in $PROGRAMS; do [ -x "$KEEP/$name" ] || return 1; done; }
if complete; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "building Kubernetes needs root and apt; tests that use it are skipped, or use KUBEBUILDER_ASSETS" >&2
    exit 3
fi

# Two at once, as of two clones, would take twice as long each: the second one waits for the first.
mkdir -p "$(dirname "$KEEP")"
exec 9>"$KEEP.lock"
flock 9
if complete; then exit 0; fi

WORK=$(mktemp -d "${TMPDIR:-/tmp}/build-kubernetes.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
# `rsync` and `jq` are called by the makefile; reflect2 1.0.2 replaces 1.0.1, which crashes under Go 1.18 and newer.
export DEBIAN_FRONTEND=noninteractive
apt-get install -y -qq --no-install-recommends golang-go rsync jq make dpkg-dev golang-github-modern-go-reflect2-dev >/dev/null
mkdir -p "$WORK/lists/partial"
awk '/^Types:/ {on = $2 == "deb"} on {sub(/^Types: deb$/, "Types: deb-src"); print} /^$/ {print}' \
    /etc/apt/sources.list.d/debian.sources > "$WORK/src.sources"
source_apt() {
    apt-get -qq -o Dir::Etc::SourceList="$WORK/src.sources" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::lists="$WORK/lists" "$@"
}
cd "$WORK"
source_apt update
source_apt source --download-only "kubernetes"
dpkg-source -x kubernetes_*.dsc src >/dev/null
rm -rf src/vendor/github.com/modern-go/reflect2/*
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2/* src/vendor/github.com/modern-go/reflect2/
cd src
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export GOPATH="$PWD/.go" GOCACHE="$WORK/gocache" HOME="$WORK" CGO_ENABLED=0 GOPROXY=off
export KUBE_GIT_VERSION=v$VERSION KUBE_GIT_TREE_STATE=clean KUBE_GIT_COMMIT=debian
# shellcheck disable=SC2086
make WHAT="$(for name in $PROGRAMS; do printf 'cmd/%s ' "$name"; done)"
mkdir -p "$KEEP.new"
for name in $PROGRAMS; do cp "_output/bin/$name" "$KEEP.new/"; strip "$KEEP.new/$name" 2>/dev/null || true; done
rm -rf "$KEEP"
mv "$KEEP.new" "$KEEP"  # complete or not there
echo "$KEEP"

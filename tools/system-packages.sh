#!/bin/sh
# Install the system packages that the tests use. Where that is not allowed, the tests that need one are skipped, each
# with its reason. One line per package: the program or file that the tests really use, then the package that has it.
set -u

NEEDED='
chromium                                                        chromium
/usr/share/fonts/truetype/liberation/LiberationSans-Regular.ttf fonts-liberation
sshd                                                            openssh-server
ssh-keygen                                                      openssh-client
rsync                                                           rsync
podman                                                          podman
runc                                                            runc
debootstrap                                                     debootstrap
docker-registry                                                 docker-registry
htpasswd                                                        apache2-utils
busybox                                                         busybox-static
slurmctld                                                       slurm-wlm
munged                                                          munge
slurmdbd                                                        slurmdbd
mariadbd                                                        mariadb-server
mpirun                                                          openmpi-bin
etcd                                                            etcd-server
containerd                                                      containerd
/usr/lib/cni/bridge                                             containernetworking-plugins
go                                                              golang-go
/usr/share/gocode/src/github.com/Masterminds/sprig              golang-github-masterminds-sprig-dev
/usr/share/gocode/src/gopkg.in/yaml.v3                          golang-gopkg-yaml.v3-dev
/usr/lib/postgresql/*/bin/initdb                                postgresql
'

PATH="$PATH:/usr/sbin"
there() {
    # The pattern is expanded on purpose: the folder of PostgreSQL carries its version.
    # shellcheck disable=SC2086
    set -- $1
    command -v "$1" >/dev/null 2>&1 || [ -e "$1" ]
}

missing=$(echo "$NEEDED" | while read -r probe package; do
    [ -z "$probe" ] || there "$probe" || printf ' %s' "$package"
done)
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null; then exit 0; fi
fi
echo "not installed:$missing (needs root and apt); the tests that use them are skipped"

"""Real containers for tests: podman with a store of its own, and a registry that wants a login."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sshd import free_port

USER, PASSWORD = "alice", "correct horse battery"
_PROGRAMS = ("podman", "docker-registry", "htpasswd", "runc", "busybox")


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Address of the registry, and a folder with a `podman` that uses a store of its own."""

    address: str
    bin: Path

    @property
    def image(self) -> str:
        return f"{self.address}/team/train:1"

    def podman(self, *words: str, stdin: bytes | None = None) -> str:
        done = subprocess.run([str(self.bin / "podman"), *words], input=stdin, capture_output=True, check=False)
        assert done.returncode == 0, (words, done.stderr.decode())
        return done.stdout.decode()

    def containers(self) -> list[str]:
        """Names of all containers, ended ones too."""
        return self.podman("ps", "--all", "--format", "{{.Names}}").split()


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[Registry]:
    """Run a registry with one image of busybox; skips the test where containers cannot run."""
    _require(_PROGRAMS)
    address = f"127.0.0.1:{free_port()}"
    made = Registry(address=address, bin=folder / "bin")
    write_podman(folder, address)
    server = _start_registry(folder, address)
    try:
        try:
            made.podman("import", "-", made.image, stdin=_image(folder))
            made.podman("run", "--rm", "--network", "host", made.image, "/bin/true")
        except AssertionError as wrong:
            pytest.skip(f"podman cannot run a container here: {str(wrong)[:300]}")
        made.podman("login", "--username", USER, "--password-stdin", address, stdin=PASSWORD.encode())
        made.podman("push", "--quiet", made.image)
        made.podman("logout", address)
        made.podman("rmi", made.image)
        yield made
    finally:
        end_podman(folder)
        server.kill()
        server.wait()


def local_podman(folder: Path) -> Registry:
    """A podman with a store of its own and no registry; skips the test where it cannot run."""
    _require(("podman", "runc", "busybox"))
    write_podman(folder, "127.0.0.1:1")
    return Registry(address="127.0.0.1:1", bin=folder / "bin")


def _require(programs: Sequence[str]) -> None:
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here: make system-packages (as root)")
    if os.geteuid() != 0:
        pytest.skip("containers of this test need root")


def write_podman(folder: Path, address: str) -> None:
    """A `podman` with settings of its own: nothing of this machine's store or configuration is touched."""
    (folder / "bin").mkdir()
    # Podman waits 20 s for each container whose socket has a path of more than 107 bytes.
    short = Path(tempfile.mkdtemp(prefix="tm-podman-", dir="/tmp"))
    (folder / "store").symlink_to(short)
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver="overlay"\ngraphroot="{short}/store"\nrunroot="{short}/run"\n'
    )
    (folder / "containers.conf").write_text(
        '[containers]\ndefault_ulimits=["nofile=20000:20000","nproc=4096:4096"]\n'
        '[engine]\nruntime="runc"\ncgroup_manager="cgroupfs"\nevents_logger="file"\n'
    )
    (folder / "registries.conf").write_text(f'[[registry]]\nlocation="{address}"\ninsecure=true\n')
    (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    program = folder / "bin" / "podman"
    program.write_text(
        f"#!/bin/sh\nexport CONTAINERS_STORAGE_CONF={folder}/storage.conf CONTAINERS_CONF={folder}/containers.conf\n"
        f"export CONTAINERS_REGISTRIES_CONF={folder}/registries.conf\n"
        f': "${{REGISTRY_AUTH_FILE:={folder}/auth.json}}"\nexport REGISTRY_AUTH_FILE\n'
        f'exec {shutil.which("podman")} "$@"\n'
    )
    program.chmod(0o755)
    (folder / "auth.json").write_text("{}")


def end_podman(folder: Path) -> None:
    """Remove the containers and the store of `write_podman`."""
    subprocess.run([str(folder / "bin" / "podman"), "rm", "--all", "--force"], capture_output=True, check=False)
    short = (folder / "store").resolve()
    subprocess.run(["umount", "-l", str(short / "store" / "overlay")], capture_output=True, check=False)
    shutil.rmtree(short, ignore_errors=True)


def _start_registry(folder: Path, address: str) -> subprocess.Popen[bytes]:
    entry = subprocess.run(["htpasswd", "-Bbn", USER, PASSWORD], check=True, capture_output=True).stdout
    (folder / "htpasswd").write_bytes(entry)
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/registry}}}}\n"
        f"http: {{addr: '{address}'}}\nauth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n"
    )
    words = ["setpriv", "--pdeathsig", "KILL", "docker-registry", "serve", str(folder / "config.yml")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY_")}
    with (folder / "registry.log").open("wb") as log:
        server = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    while True:
        assert server.poll() is None, (folder / "registry.log").read_text()
        try:
            urllib.request.urlopen(f"http://{address}/v2/", timeout=1)
        except urllib.error.HTTPError:
            return server  # 401: it is up and wants a login
        except OSError:
            continue


def _image(folder: Path) -> bytes:
    """An image with a shell and the usual tools, as a tar file."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    with tarfile.open(folder / "image.tar", "w") as archive:
        archive.add(os.path.realpath(busybox), "bin/busybox")
        for name in ("sh", "echo", "true", "sleep", "cat", "kill", "mkdir", "ls", "env", "id"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return (folder / "image.tar").read_bytes()

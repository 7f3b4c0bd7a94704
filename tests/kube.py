"""A real Kubernetes API server with etcd, and the custom resources of the operators, for tests.

Programs come from KUBEBUILDER_ASSETS, or from the cache that `make testbed-k8s` fills. Without them tests are skipped.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from sshd import free_port

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainmaster" / "k8s-1.20.2"
CRDS = Path(__file__).parent / "targets" / "kubernetes" / "crds.yaml"
ADMIN, LIMITED = "admin-token", "limited-token"  # the second has no right at all
_TOKENS = f'{ADMIN},admin,1,"system:masters"\n{LIMITED},limited,2\n'


@dataclass(kw_only=True)
class Kube:
    """A running API server."""

    folder: Path
    url: str
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: dict[int, http.client.HTTPSConnection] = field(default_factory=dict)  # one of each thread

    @property
    def ca(self) -> str:
        return (self.folder / "certs" / "apiserver.crt").read_text()

    def kubeconfig(self, token: str = ADMIN) -> Path:
        """A kubeconfig for one of the users."""
        path = self.folder / f"kubeconfig-{token}"
        cluster = {"server": self.url, "certificate-authority": "certs/apiserver.crt"}
        document = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(document))
        return path

    def call(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Any:
        """A request as admin, past the client under test."""
        data = json.dumps(body).encode() if body is not None else None
        connection = self.connections.get(threading.get_ident())
        if connection is None:
            context = ssl.create_default_context(cadata=self.ca)
            connection = http.client.HTTPSConnection(self.url.removeprefix("https://"), timeout=20, context=context)
            self.connections[threading.get_ident()] = connection
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": kind}
        for kept in (connection.sock is not None, False):  # one that was kept may have been closed by the server
            try:
                connection.request(method, path, body=data, headers=headers)
                answer = connection.getresponse()
                content = answer.read()
                break
            except (http.client.HTTPException, OSError):
                connection.close()
                if not kept:
                    del self.connections[threading.get_ident()]  # its certificate may have been half written
                    raise
        if answer.status >= 400:
            raise urllib.error.HTTPError(
                self.url + path, answer.status, answer.reason, answer.headers, io.BytesIO(content)
            )
        return json.loads(content or b"null")

    def start(self, name: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a daemon that ends with this process; its output goes to a file."""
        command = ["setpriv", "--pdeathsig", "KILL", *words]
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **(env or {})}, cwd=self.folder
            )
        self.children.append(child)
        return child


def program(name: str) -> str:
    """Path of a program of Kubernetes; the test is skipped where it is not there."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    for place in (Path(assets) / name if assets else None, CACHE / name):
        if place is not None and place.exists():
            return str(place)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: make testbed-k8s (as root, builds for minutes), or set KUBEBUILDER_ASSETS")
    return found


@contextlib.contextmanager
def serve(
    folder: Path, *, address: str = "127.0.0.1", inside: tuple[str, ...] = (), more: tuple[str, ...] = ()
) -> Iterator[Kube]:
    """Run etcd and an API server with the custom resources."""
    etcd, server = program("etcd"), program("kube-apiserver")
    port, etcd_port, peer_port = free_port(), free_port(), free_port()
    made = Kube(folder=folder, url=f"https://{address}:{port}")
    (folder / "tokens.csv").write_text(_TOKENS)
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True)
    try:
        clients, peers = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
        made.start(
            "etcd", *inside, etcd, f"--data-dir={folder}/etcd", "--unsafe-no-fsync", f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}", f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}",
            env={"ETCD_UNSUPPORTED_ARCH": "arm64"},
        )  # fmt: skip
        api = made.start(
            "apiserver", *inside, server, f"--etcd-servers={clients}", f"--secure-port={port}",
            f"--bind-address={address}", f"--advertise-address={address}", f"--cert-dir={folder}/certs",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={folder}/sa.key", f"--service-account-key-file={folder}/sa.key",
            f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged=true", *more,
        )  # fmt: skip
        _wait(made, api)
        for one in yaml.safe_load_all(CRDS.read_text()):
            made.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", one)
        yield made
    finally:
        for connection in made.connections.values():
            connection.close()
        for child in reversed(made.children):
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
            child.wait()


def _wait(made: Kube, api: subprocess.Popen[bytes]) -> None:
    while True:
        assert api.poll() is None, (made.folder / "apiserver.log").read_text()[-3000:]
        try:
            made.call("GET", "/api/v1/namespaces/default")
            return
        except OSError:
            time.sleep(0.1)

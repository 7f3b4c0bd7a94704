"""deploy/compose.yaml started by podman-compose, without a network to the outside: the server answers to its token."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube_nodes
import own_image
from deploy.charts import CHART

COMPOSE = CHART.parents[1] / "compose.yaml"
TOKEN = f"tm_{'c' * 43}"


class Stack:
    """The services of the file, in a network namespace of their own."""

    def __init__(self, folder: Path, podman: Path, netns: str) -> None:
        self._folder, self._podman, self._netns = folder, podman, netns
        self._env = {
            **os.environ,
            "TRAINMASTER_IMAGE": own_image.NAME,
            "PATH": f"{podman.parent}:{os.environ['PATH']}",
            "DISABLE_HC_SYSTEMD": "true",  # podman's timer of health checks; here one is run by hand
        }

    def compose(self, *words: str) -> subprocess.CompletedProcess[str]:
        files = [word for name in ("compose.yaml", "here.yaml") for word in ("-f", str(self._folder / name))]
        program = [sys.executable, "-m", "podman_compose", "--podman-path", str(self._podman), *files]
        return self.inside(*program, *words)

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", f"--net=/run/netns/{self._netns}", *words]  # `ip netns exec` would hide the cgroups
        return subprocess.run(command, capture_output=True, text=True, env=self._env, check=False, timeout=170)

    def ask(self, path: str, *headers: str) -> str:
        """The status and the body at a path of the server."""
        url = f"http://127.0.0.1:8470{path}"
        return self.inside("curl", "--silent", "--max-time", "10", "--write-out", "%{http_code}", *headers, url).stdout


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    if importlib.util.find_spec("podman_compose") is None:
        pytest.skip("no podman-compose: pip install podman-compose")
    netns = f"tm-compose-{os.getpid()}"
    with own_image.built(tmp_path) as image:
        if subprocess.run(["ip", "netns", "add", netns], capture_output=True, check=False).returncode:
            pytest.skip("no network namespace can be made here")
        try:
            subprocess.run(["ip", "netns", "exec", netns, "ip", "link", "set", "lo", "up"], check=True)
            folder = tmp_path / "deploy"
            folder.mkdir()
            (folder / "compose.yaml").write_text(COMPOSE.read_text())
            (folder / "admin-token").write_text(TOKEN)
            # What this place needs and the file does not say: its own Python, and no bridge.
            mounts = [f"{place}:{place}:ro" for place in kube_nodes.python_folders()]
            here = {"services": {"server": {"volumes": mounts, "network_mode": "host"}}}
            (folder / "here.yaml").write_text(yaml.safe_dump(here))
            made = Stack(folder, image.registry.bin / "podman", netns)
            yield made
            made.compose("down", "--volumes")
        finally:
            subprocess.run(["ip", "netns", "delete", netns], capture_output=True, check=False)


@pytest.mark.matrix(one_in=3, of="images that podman builds")
@pytest.mark.timeout(600)
def test_the_server_of_the_compose_file_answers(stack: Stack) -> None:
    up = stack.compose("up", "--detach", "--no-build")
    assert up.returncode == 0, up.stdout + up.stderr
    until = time.monotonic() + 120
    while not stack.ask("/readyz").endswith("200"):
        assert time.monotonic() < until, stack.compose("logs").stdout
        time.sleep(0.5)
    header = ("--header", f"Authorization: Bearer {TOKEN}")
    assert stack.ask("/v1/me").endswith("401") and '"admin"' in stack.ask("/v1/me", *header)
    assert stack.ask("/login").endswith("200")
    (seen,) = json.loads(stack.inside("podman", "inspect", *stack.compose("ps", "-q").stdout.split()).stdout)
    host: dict[str, Any] = seen["HostConfig"]
    assert host["ReadonlyRootfs"] and seen["Config"]["User"] == "1000:1000" and seen["EffectiveCaps"] in (None, [])
    assert "no-new-privileges" in " ".join(host["SecurityOpt"]) and TOKEN not in json.dumps(seen)
    name = seen["Name"]
    assert stack.inside("podman", "exec", name, "touch", "/opt/x").returncode != 0, "a read-only root"
    assert stack.inside("podman", "healthcheck", "run", name).returncode == 0
    again = stack.compose("restart")
    assert again.returncode == 0, again.stderr
    until = time.monotonic() + 120
    while '"admin"' not in stack.ask("/v1/me", *header):
        assert time.monotonic() < until, "the volume keeps the database"
        time.sleep(0.5)

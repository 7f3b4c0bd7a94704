"""Targets find the package under test, and a way to run a coroutine."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube_nodes
import trainmaster
from lambda_sim import lambda_cloud
from rests import rests
from slurm import Cluster
from sshd import Lab, lab, needs_sshd
from trainmaster import targets
from trainmaster.core.plan import rank_log
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import TargetState
from trainmaster.targets import (
    Handle,
    InstanceState,
    Label,
    LaunchRequest,
    Placement,
    Places,
    Poll,
    Rents,
    Submission,
    Target,
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(trainmaster.__file__).parents[1]))


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    async def and_close(work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        finally:
            await targets.close()

    return lambda work: asyncio.run(and_close(work))


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three machines behind OpenSSH servers, each with a home folder of its own."""
    with lab(tmp_path_factory.mktemp("ssh")) as made:
        for name in ("n1", "n2", "n3"):
            made.start(name)
        made.wait()
        yield made


@pytest.fixture
def hosts_file(machines: Lab, tmp_path: Path) -> Path:
    """A hosts file of the three. Attempts of other tests that have ended hold no slot."""
    hosts = [{"host": "127.0.0.1", "name": one.name, "port": one.port, "slots": 4} for one in machines.hosts]
    document = {
        "known_hosts": str(machines.known_hosts),
        "defaults": {"key": str(machines.key), "python": sys.executable},
        "hosts": hosts,
    }
    path = tmp_path / "hosts.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def cluster_file(slurm: Cluster, tmp_path: Path) -> Path:
    """A cluster file of the real Slurm."""
    document = {"folder": str(slurm.folder / "shared"), "env": {"SLURM_CONF": str(slurm.conf)}, "poll_s": 0.3}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="session")
def pool_file(machines: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool of one machine."""
    access = {"key": str(machines.key), "python": sys.executable, "folder": "~/.trainmaster-pool"}
    path = tmp_path_factory.mktemp("pool") / "pool.yaml"
    host = {"host": "127.0.0.1", "port": machines.hosts[0].port, "gpus": 1}
    path.write_text(yaml.safe_dump({"access": access, "hosts": [host]}))
    return path


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that point the target `lambda` at a simulator."""
    with pytest.MonkeyPatch.context() as patch, lambda_cloud(tmp_path_factory.mktemp("cloud"), patch):
        found = {name: value for name, value in os.environ.items() if name.startswith("LAMBDA_")}
        patch.undo()
        yield found


@pytest.fixture(scope="session")
def pod_cluster() -> Iterator[kube_nodes.Cluster]:
    """Two nodes with kubelets."""
    with kube_nodes.cluster() as made:
        yield made


@pytest.fixture
def pods_file(pod_cluster: kube_nodes.Cluster, tmp_path: Path) -> Path:
    """Settings of the real Kubernetes."""
    path = tmp_path / "pods.yaml"
    path.write_text(yaml.safe_dump(pod_cluster.settings("default")))
    return path


# A pod takes seconds to start: `make contract-k8s` holds this target to the contract, `make test` to its own tests.
in_pods = pytest.mark.make("contract-k8s")


@pytest.fixture(
    params=[
        "local",
        *(pytest.param(one, marks=needs_sshd) for one in ("ssh", "pool", "lambda")),
        "slurm",
        pytest.param("kubernetes", marks=in_pods),
    ]
)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each target that can run here, as a spec names it."""
    if request.param == "lambda":
        for variable, value in request.getfixturevalue("cloud").items():
            monkeypatch.setenv(variable, value)
    files = {"ssh": "hosts_file", "pool": "pool_file", "slurm": "cluster_file", "kubernetes": "pods_file"}
    if request.param not in files:
        return str(request.param)
    return f"{request.param}:{request.getfixturevalue(files[request.param])}"


@pytest.fixture(scope="session")
def rented() -> dict[str, Handle]:
    """Machines that were rented for the tests: one of each target, for all tests."""
    return {}


@pytest.fixture
def reserve(name: str, rented: dict[str, Handle]) -> Callable[..., Coroutine[Any, Any, Submission]]:
    """What the control plane does before it submits."""

    async def reserve(target: Target, submission: Submission) -> Submission:
        if isinstance(target, Rents):
            if name not in rented:
                rented[name] = await rent(target, submission)
            return replace(submission, handle={**submission.handle, **rented[name]})
        if not isinstance(target, Places):
            return submission
        return replace(submission, handle=await target.place(submission))

    return reserve


async def rent(target: Rents, submission: Submission) -> Handle:
    """Launch a machine and log in; the parts of the handle that name it."""
    offer = (await target.choose(parse_spec({"name": "a", "command": ["true"]}), refused=()))[0]
    label = Label(attempt=str(submission.handle["attempt"]), home=str(submission.handle["home"]))
    machine = await target.launch(LaunchRequest(name=label.name, kind=offer.kind, region=offer.region))
    while True:
        found = (await target.listing()).find(label.name, provider_id=machine)
        if found is not None and found.state is InstanceState.ACTIVE and found.address is not None:
            break
        await asyncio.sleep(0.05)
    named = {**submission.handle, "instances": [{"id": machine, "name": label.name}]}
    connected = await target.connect(named, [found])
    return {part: connected[part] for part in ("instances", "nodes", "hosts")}


@pytest.fixture
def free() -> Callable[..., Coroutine[Any, Any, None]]:
    """End an attempt by force; its files stay readable. A rented machine is kept for the next test."""

    async def free(target: Target, handle: Handle) -> None:
        await (target.stop(handle) if isinstance(target, Rents) else target.release(handle))

    return free


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Placement]:
    def place(script: str = "echo hello", *, number: int = 1, **spec: Any) -> Placement:
        mapping = {"name": "a", "preflight": {"level": 0}, "command": ["sh", "-c", script], **spec}
        folder = tmp_path / "a-job"
        # No two tests may find each other's processes.
        return Placement(
            attempt=f"{uuid.uuid5(uuid.NAMESPACE_URL, str(tmp_path))}.{number}",
            spec=parse_spec(mapping),
            job_folder=folder,
        )

    return place


@pytest.fixture
def end() -> Callable[..., Coroutine[Any, Any, Poll]]:
    async def end(target: Target, handle: Handle, *, limit_s: float = 60.0) -> Poll:
        """Poll until the attempt is over; the limit only ends a test that has failed."""
        async with asyncio.timeout(limit_s):
            for rest_s in rests():
                if (poll := await target.poll(handle)).state.over:
                    break
                assert poll.state in (TargetState.WAITING, TargetState.RUNNING), poll
                await asyncio.sleep(rest_s)
        return poll

    return end


@pytest.fixture
def printed() -> Callable[..., Coroutine[Any, Any, bytes]]:
    async def printed(target: Target, handle: Handle, *, limit_s: float = 60.0) -> bytes:
        """What rank 0 says first: the sign that it is up."""
        async with asyncio.timeout(limit_s):
            for rest_s in rests():
                if text := await target.read(handle, rank_log(0), offset=0, limit=100):
                    break
                await asyncio.sleep(rest_s)
            return text

    return printed

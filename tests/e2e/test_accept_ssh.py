"""Acceptance training over real OpenSSH hosts: one rank on each, one verdict; a host that is gone is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sshd import Lab, free_port, lab, needs_sshd
from trainmaster.bench.accept.options import Options
from trainmaster.cluster.acceptance import suite
from trainmaster.cluster.acceptance.run import accept
from trainmaster.cluster.acceptance.suite_plan import Machine, plan
from trainmaster.targets.ssh.target import Ssh

pytestmark = needs_sshd
OPTIONS = Options(
    model="transformer", layers=1, width=16, heads=2, sequence=8, num_classes=11, batch_size=4, warmup_iterations=1,
    active_iterations=3, min_throughput=0.01, backend="gloo",
)  # fmt: skip


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("ssh")) as made:
        for name in ("n1", "n2"):
            made.start(name)
        made.wait()
        yield made


def hosts(made: Lab, *, count: int = 2, **ports: int) -> Ssh:
    entries = [{"name": host.name, "port": host.port} for host in made.hosts[:count]]
    entries += [{"name": name, "port": port} for name, port in ports.items()]
    defaults = {
        "host": "127.0.0.1", "user": os.environ.get("USER", "root"), "key": str(made.key), "python": sys.executable,
    }  # fmt: skip
    document = {"known_hosts": "known_hosts", "defaults": defaults, "hosts": entries}
    path = Path(made.folder) / "accept.yaml"
    path.write_text(yaml.safe_dump(document))
    return Ssh(path)


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.slow
def test_two_hosts_train_together(machines: Lab) -> None:
    document = accept(hosts(machines), OPTIONS, home=machines.folder / "home")
    assert (document["world_size"], document["nodes"]) == (2, 2), document["checks"]
    assert len({one["parameters_digest"] for one in document["ranks"]}) == 1
    assert document["total_samples"] == 2 * 4 * 3


@pytest.mark.proof
def test_a_host_that_is_gone_is_named_and_nothing_passes(machines: Lab) -> None:
    document = accept(hosts(machines, count=1, gone=free_port()), OPTIONS, home=machines.folder / "home")
    assert (document["overall"], document["exit_code"]) == ("INCOMPLETE", 3)
    (check,) = document["checks"]
    assert [one["device"] for one in check["findings"]] == ["gone"]
    assert "nothing listens" in check["findings"][0]["reason"]


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.slow
def test_a_suite_measures_collectives_between_the_hosts(machines: Lab, tmp_path: Path) -> None:
    entries = [{"name": host.name, "port": host.port} for host in machines.hosts[:2]]
    user = os.environ.get("USER", "root")
    defaults = {"host": "127.0.0.1", "user": user, "key": str(machines.key), "python": sys.executable}
    document = {"known_hosts": str(machines.folder / "known_hosts"), "defaults": defaults, "hosts": entries}
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(document))
    machine = Machine(on=f"ssh:{tmp_path / 'hosts.yaml'}", gpus=0)
    parts = plan("quick", OPTIONS, machine, tmp_path, min_busbw=0.0001)
    chosen = [part for part in parts if part.name == "bandwidth"]
    (part,) = suite.run("quick", chosen, tmp_path / "out", on=machine.on, show=lambda _: None)["parts"]
    assert (part["overall"], part["exit_code"]) == ("PASS", 0), part
    assert (part["document"]["world"], part["document"]["nodes"]) == (2, 2)

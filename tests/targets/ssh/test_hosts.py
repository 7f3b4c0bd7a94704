"""hosts.yaml: every fault at once, no secret in it, no name that could leave its folder."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import NoAccess, NoCapacity, SpecError
from trainmaster.core.spec import JobSpec
from trainmaster.targets import Placement
from trainmaster.targets.ssh.hosts import SshHost, parse_hosts, read_known_hosts
from trainmaster.targets.ssh.session import Reply
from trainmaster.targets.ssh.target import Ssh

HERE = Path("/cluster")
_GPU = ["GPU-a1", "H200", "GPU-a1", [["", "process 7 holds 900 MiB"]]]


class _Host:
    """A host that answers at once: untrusted, as every answer is."""

    def __init__(self, name: str, **answers: Any) -> None:
        self.host, self._answers = SshHost(host=name, name=name), answers

    async def request(self, method: str, **_: Any) -> Reply:
        return Reply(result=self._answers[method], body=b"")


@pytest.mark.parametrize(
    "gpus",
    [
        None,
        [_GPU, "GPU-a2"],
        [["GPU-a1", "H200", "GPU-a1"]],
        [["0", "H200", "GPU-a1", []]],
        [["GPU-a1", "H200", "GPU-a1", None]],
        [["GPU-a1", "H200", "GPU-a1", [["", "process 7 holds 900 MiB", "and more"]]]],
        [["GPU-a1", "H200", "GPU-a1", [["process 7 holds 900 MiB"]]]],
        [["GPU-a1", "H200", "GPU-a1", [[None, "process 7"]]]],
        [_GPU] * 257,
    ],
)
def test_gpus_that_cannot_be_read_are_of_a_silent_host_and_none_of_them_is_free(
    gpus: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [_Host("n1", list_gpus={"gpus": gpus}), _Host("n2", list_gpus={"gpus": [_GPU]})]
    monkeypatch.setattr(Ssh, "_sessions", lambda _: hosts)
    listing = asyncio.run(Ssh(Path("hosts.yaml")).list_devices())
    assert [(device.machine, device.used) for device in listing.devices["gpu"]] == [("n2", "process 7 holds 900 MiB")]
    assert list(listing.silent) == ["n1"] and "malformed answer: n1: " in listing.silent["n1"]
    assert listing.answered == ["n2"]


@pytest.mark.parametrize(("hides", "on"), [(False, ["n2"]), (True, ["n1"])])
def test_by_slots_a_job_goes_to_no_host_that_may_have_gpus_unless_it_hides_them(
    hides: bool, on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = {name: {"free": 1, "held": [], "knows": [], "bare": name == "n2"} for name in ("n1", "n2")}
    hosts = [_Host(name, offer=offer, claim={"held": True}) for name, offer in offers.items()]
    monkeypatch.setattr(Ssh, "_sessions", lambda _: hosts)
    monkeypatch.setattr(Ssh, "hosts", lambda _: parse_hosts({"hosts": ["n1", "n2"]}, HERE))
    spec = JobSpec(name="j", command=("x",), env={"CUDA_VISIBLE_DEVICES": ""} if hides else {})
    target = Ssh(Path("hosts.yaml"))
    planned = target.plan(Placement(attempt="a.1", spec=spec, job_folder=HERE))
    assert asyncio.run(target.place(planned))["nodes"] == on
    assert target.list_machines() == ["n1", "n2"]
    drained = replace(planned, avoid={"n1": "drained: a fan"})
    assert asyncio.run(target.place(drained))["nodes"] == ["n2"]
    with pytest.raises(NoCapacity, match=r"0 of 2 machines take new jobs \(n1: drained: a fan; n2: drained: a cable\)"):
        asyncio.run(target.place(replace(planned, avoid={"n1": "drained: a fan", "n2": "drained: a cable"})))


def test_by_slots_a_machine_whose_check_failed_is_taken_last(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = {"free": 1, "held": [], "knows": ["a.2"], "bare": True}
    hosts = [_Host(name, offer=offer, claim={"held": True}) for name in ("n1", "n2")]
    hosts[1]._answers = {**hosts[1]._answers, "offer": {**offer, "knows": []}}
    monkeypatch.setattr(Ssh, "_sessions", lambda _: hosts)
    monkeypatch.setattr(Ssh, "hosts", lambda _: parse_hosts({"hosts": ["n1", "n2"]}, HERE))
    target, spec = Ssh(Path("hosts.yaml")), JobSpec(name="j", command=("x",))
    planned = replace(target.plan(Placement(attempt="a.2", spec=spec, job_folder=HERE)), last=("n1",))
    assert asyncio.run(target.place(planned))["nodes"] == ["n2"], "though its job was on n1 before"
    alone = replace(planned, avoid={"n2": "drained: a fan"})
    assert asyncio.run(target.place(alone))["nodes"] == ["n1"]


def test_names_mappings_and_defaults() -> None:
    found = parse_hosts(
        {
            "known_hosts": "keys",
            "defaults": {"user": "ubuntu", "key": "id", "port": 2222},
            "hosts": ["gpu-01", {"host": "10.0.0.2", "name": "gpu-02", "port": 22, "rack": "r1"}],
        },
        HERE,
    )
    assert found.known_hosts == HERE / "keys"
    first, second = found.hosts
    assert (first.name, first.host, first.user, first.port, first.key) == (
        "gpu-01",
        "gpu-01",
        "ubuntu",
        2222,
        "/cluster/id",
    )
    assert (second.name, second.host, second.port, second.rack, second.python) == (
        "gpu-02",
        "10.0.0.2",
        22,
        "r1",
        "python3",
    )


def test_a_bare_list_is_enough() -> None:
    found = parse_hosts(["a", "b"], HERE)
    assert [host.name for host in found.hosts] == ["a", "b"]
    assert found.known_hosts == Path("~/.ssh/known_hosts").expanduser()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"hosts": []}, "no host"),
        ({}, "hosts"),
        ("gpu-01", "mapping"),
        (["a", "a"], "2 hosts are called a"),
        ([{"host": "a", "password": "x"}], "secrets are not allowed"),
        ({"defaults": {"passphrase": "x"}, "hosts": ["a"]}, "secrets are not allowed"),
        (["../a"], "does not fit"),
        (["-oProxyCommand=x"], "does not fit"),
        ([{"host": "a", "name": "x/../../y"}], "does not fit"),
        ([{"host": "a", "port": 70000}], "out of range"),
        ([{"host": "a", "prot": 22}], "port"),
        ([3], "mapping"),
    ],
)
def test_what_is_wrong_is_told(document: object, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_hosts(document, HERE)


def test_all_faults_come_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_hosts([{"host": "a", "port": 0}, "b c", "d", "d"], HERE)
    assert len(caught.value.faults) == 3


def test_no_known_hosts_trusts_nobody(tmp_path: Path) -> None:
    assert read_known_hosts(tmp_path / "none") == b""


def test_a_key_that_no_host_can_be_reached_with_is_told_before_anybody_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("defaults: {key: missing}\nknown_hosts: known\nhosts: [127.0.0.1]\n")
    (tmp_path / "known").write_text("")
    target = Ssh(path)
    planned = target.plan(
        Placement(
            attempt="00000000-0000-4000-8000-000000000000.1",
            spec=JobSpec(name="a", command=("true",), target=f"ssh:{path}"),
            job_folder=tmp_path / "jobs" / "x",
        )
    )
    with pytest.raises(NoAccess, match="missing cannot be read here; nothing was sent"):
        asyncio.run(target.place(planned))

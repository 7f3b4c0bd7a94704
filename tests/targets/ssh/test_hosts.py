"""hosts.yaml: every fault at once, no secret in it, no name that could leave its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.core.errors import SpecError
from trainmaster.targets.ssh.hosts import parse_hosts, read_known_hosts

HERE = Path("/cluster")


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

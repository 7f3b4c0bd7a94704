"""Collectives and pair tests between real OpenSSH hosts: gloo over the loopback, and a rank that stops is named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainmaster
from sshd import Lab, Sshd, free_port, lab, needs_sshd
from trainmaster.cluster.collectives.pairs import Pairs
from trainmaster.targets.ssh.target import Ssh

pytestmark = needs_sshd
SOURCE = str(Path(trainmaster.__file__).parents[1])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("ssh")) as made:
        for number in range(1, 4):
            made.start(f"n{number}")
        made.wait()
        yield made


def start(lab: Lab, entries: list[dict[str, object]], *words: str) -> subprocess.Popen[str]:
    file = lab.folder / "hosts.yaml"
    user, key = os.environ.get("USER", "root"), str(lab.key)
    defaults = {"host": "127.0.0.1", "user": user, "key": key, "python": sys.executable}
    file.write_text(yaml.safe_dump({"known_hosts": "known_hosts", "defaults": defaults, "hosts": entries}))
    return subprocess.Popen(
        [sys.executable, "-m", "trainmaster", words[0], "--on", f"ssh:{file}", "--json", *words[1:]],
        env={**os.environ, "PYTHONPATH": SOURCE}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(run: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, err = run.communicate()
    assert out, err
    return run.returncode, json.loads(out)


def all_hosts(lab: Lab) -> list[dict[str, object]]:
    return [{"name": host.name, "port": host.port} for host in lab.hosts]


def collectives(health: dict[str, Any]) -> list[dict[str, Any]]:
    (result,) = [result for result in health["cluster"] if result["check"] == "collectives"]
    return list(result["findings"])


def ranks(host: Sshd) -> list[int]:
    """The processes of collectives whose home is that host's, found as any process is: by /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            home = f"HOME={host.home}".encode()
            if b"trainmaster.bench.collectives" in command and home in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_three_hosts_verify_their_data_and_draw_a_curve(hosts: Lab, tmp_path: Path) -> None:
    entries = all_hosts(hosts)
    entries.insert(1, {"name": "gone", "port": free_port()})
    out = tmp_path / "bundle"
    words = ("check", "--level", "2", "--only", "cpu,collectives", "--timeout", "60", "--out", str(out))
    code, health = end(start(hosts, entries, *words))

    assert (code, health["overall"]) == (3, "INCOMPLETE")  # one is silent
    findings = collectives(health)
    passed = [finding["reason"] for finding in findings if finding["verdict"] == "pass"]
    assert "all 3 ranks on 3 nodes finished all 3 points; without gone" in passed
    assert any(reason.startswith("every element of 3 points was right on all 3 ranks") for reason in passed)
    assert any("gloo carries everything by TCP" in reason for reason in passed)
    (left_out,) = [finding for finding in findings if finding["device"] == "gone"]
    assert "no answer (nothing listens at " in left_out["reason"]
    (curve,) = [finding for finding in findings if finding["values"].get("collective") == "all_reduce"]
    assert [point["size_bytes"] for point in curve["values"]["points"]] == [64 << 10, 1 << 20, 16 << 20]
    assert all(point["busbw_gbps"] > 0 for point in curve["values"]["points"])
    metrics = json.loads((out / "health_check_metrics.json").read_text())
    rate = metrics["cluster_summary"]["performance_summary"]["distributed_all_reduce_bandwidth_gbps"]
    assert rate == max(point["busbw_gbps"] for point in curve["values"]["points"])
    assert len(list((out / "collectives").glob("rank-*.out"))) == 3


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_rank_that_is_stopped_in_the_middle_is_named_and_the_rest_kept(hosts: Lab) -> None:
    run = start(hosts, all_hosts(hosts), "check", "--level", "3", "--only", "cpu,collectives", "--timeout", "40")
    first = hosts.hosts[0]
    while not any(rows(pid) >= 2 for pid in ranks(first)):
        assert run.poll() is None
        time.sleep(0.05)
    (pid,) = ranks(hosts.hosts[2])
    folder = next(word[7:] for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if word[:7] == "TMPDIR=")
    os.kill(pid, signal.SIGSTOP)
    code, health = end(run)

    assert (code, health["overall"]) == (1, "FAIL")
    assert [node["node"] for node in health["nodes"]] == ["n1", "n2", "n3"]
    failed = [finding for finding in collectives(health) if finding["verdict"] == "fail"]
    assert [finding["device"] for finding in failed] == ["n3"]
    assert "rank 2 on n3 " in failed[0]["reason"]
    assert "its node reports: its process is stopped" in failed[0]["reason"]
    kept = [finding for finding in collectives(health) if finding["values"].get("points")]
    assert sum(len(finding["values"]["points"]) for finding in kept) >= 2
    assert not any(ranks(host) for host in hosts.hosts)  # ended everywhere, the stopped one too
    assert not Path(folder).exists()


def rows(pid: int) -> int:
    """How many rows that process has printed: its standard output is a file on its host."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/1").read_bytes().count(b'"row"')
    return 0


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_round_of_pairs_measures_and_one_that_cannot_talk_is_none(hosts: Lab) -> None:
    """The ranks of one are told of an interface that is not there: its SSH is well, and nobody can talk to it."""
    deaf = hosts.folder / "deaf-python"
    deaf.write_text(f'#!/bin/sh\nGLOO_SOCKET_IFNAME=none0 exec "{sys.executable}" "$@"\n')
    deaf.chmod(0o755)
    entries = [{**entry, "rack": "r1"} for entry in all_hosts(hosts)]
    entries += [{**entries[2], "name": "deaf", "python": str(deaf)}]
    machine = {"host": "127.0.0.1", "user": os.environ.get("USER", "root"), "key": str(hosts.key)}
    document = {
        "known_hosts": "known_hosts", "defaults": {"python": sys.executable, **machine},
        "hosts": [*entries, {"name": "gone", "port": free_port()}],
    }  # fmt: skip
    (hosts.folder / "pairs.yaml").write_text(yaml.safe_dump(document))
    target = Ssh(hosts.folder / "pairs.yaml")
    pairs = Pairs(target, home=hosts.folder / "home", size="1M", timeout_s=60, rounds=2)
    try:
        assert (pairs.backend, set(pairs.silent)) == ("gloo", {"gone"})
        assert pairs.nodes == [entry["name"] for entry in entries]
        first, second = pairs.measure([("n1", "n2"), ("n3", "deaf")])
    finally:
        pairs.close()
    assert first is not None and first > 0
    assert second is None


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_isolate_over_ssh_is_honest_about_too_few_rounds_and_names_the_silent(hosts: Lab) -> None:
    entries = [{**entry, "rack": "r1"} for entry in all_hosts(hosts)[:2]] + [{"name": "gone", "port": free_port()}]
    code, told = end(start(hosts, entries, "isolate", "--max-rounds", "1", "--size", "64K", "--timeout", "60"))
    assert code == 3
    assert set(told["silent"]) == {"gone"} and "nothing listens" in told["silent"]["gone"]
    diagnosis = told["diagnosis"]
    assert (diagnosis["verdict"], diagnosis["suspects"]) == ("INCOMPLETE", [])
    assert (diagnosis["rounds"], diagnosis["measurements"]) == (1, 1)


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_bandwidth_over_ssh_names_the_silent(hosts: Lab) -> None:
    entries = [*all_hosts(hosts)[:2], {"name": "gone", "port": free_port()}]
    words = ("--collective", "all_reduce", "--min", "64K", "--max", "64K", "--min-busbw", "0.0001", "--processes", "2")
    code, told = end(start(hosts, entries, "bandwidth", *words))
    assert (code, told["overall"], told["world"]) == (3, "INCOMPLETE", 4), told["results"]
    assert set(told["silent"]) == {"gone"} and "nothing listens" in told["silent"]["gone"]
    judged = {result["check"]: result["findings"][0]["verdict"] for result in told["results"]}
    assert (judged["collective_ranks"], judged["collective_bandwidth"]) == ("pass", "pass")
    assert judged["collective_nodes"] == "error"

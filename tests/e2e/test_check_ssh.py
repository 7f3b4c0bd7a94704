"""`trainmaster check --on ssh:hosts.yaml` over real OpenSSH hosts: sick ones are named and block nobody."""

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
from trainmaster.cluster.health import gather
from trainmaster.core.results import Overall
from trainmaster.targets.ssh.hosts import parse_hosts
from trainmaster.targets.ssh.nodes import SshNodes

pytestmark = needs_sshd
SOURCE = str(Path(trainmaster.__file__).parents[1])
TESTS = str(Path(__file__).parents[1])
ONLY = "cpu,gpu_driver,kernel,memlock,ram,shm"
NODES = 8
TIMEOUT_S = 12.0  # 6 hosts share the cores of one machine here, and one hangs as long as this


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("ssh")) as made:
        yield made


def entry(host: Sshd, **more: object) -> dict[str, object]:
    return {"name": host.name, "port": host.port, **more}


def check(lab: Lab, entries: list[dict[str, object]], *words: str, **top: object) -> tuple[int, dict[str, Any], str]:
    file = lab.folder / "hosts.yaml"
    defaults = {
        "host": "127.0.0.1",
        "user": os.environ.get("USER", "root"),
        "key": str(lab.key),
        "python": sys.executable,
    }
    file.write_text(yaml.safe_dump({"known_hosts": "known_hosts", "defaults": defaults, "hosts": entries, **top}))
    ran = subprocess.run(
        [sys.executable, "-m", "trainmaster", "check", "--on", f"ssh:{file}", "--json", "--only", ONLY, *words],
        env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout), ran.stderr


def silent(health: dict[str, Any]) -> dict[str, str]:
    assert all(node["verdict"] == "error" and node["action"] for node in health["silent"])
    return {node["node"]: node["reason"] for node in health["silent"]}


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.alone
def test_8_hosts_one_unreachable_and_one_hanging(hosts: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    marker = f"sleep-{os.getpid()}"
    hanging = hosts.folder / marker
    hanging.write_text("#!/bin/sh\nsleep 987\n")
    hanging.chmod(0o755)
    alive = [hosts.start(f"n{i:02}") for i in range(NODES - 1)]
    hosts.wait()
    entries = [entry(host) for host in alive]
    entries[5]["python"] = str(hanging)
    entries.insert(3, {"name": "n99", "port": free_port()})
    bundle = hosts.folder / "bundle"
    code, health, said = check(hosts, entries, "--timeout", str(TIMEOUT_S), "--out", str(bundle))

    assert (code, health["overall"]) == (3, "INCOMPLETE")
    assert set(silent(health)) == {"n05", "n99"}, silent(health)
    assert f"gave no answer in {TIMEOUT_S:.0f} s" in silent(health)["n05"]
    assert "nothing listens" in silent(health)["n99"]
    heard = {node["node"]: node for node in health["nodes"]}
    assert len(heard) == NODES - 2
    assert all(len(node["results"]) == len(ONLY.split(",")) for node in heard.values())
    assert {result["check"] for result in health["cluster"]} == {"drift", "peers", "digests"}
    # The promise itself: nobody waits for the hung one longer than its timeout.
    slowest = max(node["took_s"] for node in heard.values())
    assert health["took_s"] < TIMEOUT_S + slowest + 5
    # What hung there is ended, and nothing of ours is left.
    wait_until_gone(marker)

    again = subprocess.run(
        [sys.executable, "-m", "trainmaster", "rejudge", str(bundle), "--json"],
        env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, check=False,
    )  # fmt: skip
    assert (again.returncode, again.stdout) == (3, (bundle / "verdict.json").read_bytes())
    with capsys.disabled():
        print(f"\n  {said.strip()}; checks on a host {min(n['took_s'] for n in heard.values())} to {slowest} s")


@pytest.mark.proof
def test_each_refusal_is_told_apart_and_the_healthy_host_completes(hosts: Lab) -> None:
    well, stuck, stranger, changed, deaf, frozen = (
        hosts.start("well"),
        hosts.start("stuck"),
        hosts.start("stranger", known=False),
        hosts.start("changed", own_key=True, known=False),
        hosts.start("deaf"),
        hosts.start("frozen"),
    )
    hosts.wait()
    other = Path(f"{hosts.folder / 'host'}.pub").read_text().split()
    with hosts.known_hosts.open("a") as file:
        file.write(f"[127.0.0.1]:{changed.port} {other[0]} {other[1]}\n")
    frozen.stop()
    stuck_python, marker = stuck_tools(hosts.folder)
    wrong_key = hosts.folder / "host"  # a key, and not one that the servers know
    scripts = {
        "old": "#!/bin/sh\necho trainmaster-needs-3.10 3.6 >&2; exit 1\n",
        "rubbish": "#!/bin/sh\nyes rubbish | head -c 3000000\n",
        "noisy": f'#!/bin/sh\necho welcome to this machine\nexec "{sys.executable}" "$@"\n',
    }
    for name, text in scripts.items():
        (hosts.folder / name).write_text(text)
        (hosts.folder / name).chmod(0o755)
    entries = [
        entry(well),
        entry(stuck, python=str(stuck_python)),
        entry(stranger),
        entry(changed),
        entry(deaf, key=str(wrong_key)),
        entry(frozen),
        *(entry(well, name=name, python=str(hosts.folder / name)) for name in scripts),
        entry(well, name="bare", python="/no/python"),
        entry(well, name="nokey", key="/no/key"),
        {"name": "nowhere", "host": "no-such-host.invalid"},
    ]
    code, health, _ = check(hosts, entries, "--timeout", "30")
    reasons = silent(health)
    expected = {
        "stuck": "it was in gpu_driver",
        "stranger": "not in known_hosts",
        "changed": "not the one in known_hosts",
        "deaf": "it refuses user",
        "frozen": "no SSH server answered",
        "old": "its Python is 3.6",
        "rubbish": "malformed answer",
        "bare": "no such Python",
        "nokey": "cannot be used",
        "nowhere": "does not resolve",
    }
    assert code == 3
    assert set(reasons) == set(expected)
    for name, words in expected.items():
        assert words in reasons[name], (name, reasons[name])
    assert {node["node"] for node in health["nodes"]} == {"well", "noisy"}
    actions = {node["node"]: node["action"] for node in health["silent"]}
    assert f"ssh-keyscan -p {stranger.port} 127.0.0.1 | ssh-keygen -lf -" in actions["stranger"]
    assert not (stranger.home / ".cache").exists()
    # What hung was ended by the node's own half, also what had left its process group.
    wait_until_gone(marker)


def wait_until_gone(marker: str) -> None:
    """A killed process takes a moment to go; one that was not killed fails the test by its timeout."""
    while subprocess.run(["pgrep", "-f", marker], check=False, capture_output=True).stdout:
        time.sleep(0.1)


def stuck_tools(folder: Path) -> tuple[Path, str]:
    """A Python that finds an nvidia-smi which hangs and has a child that left its process group."""
    tools, marker, python = folder / "tools", f"stuck-{os.getpid()}", folder / "python-with-tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\nsetsid sh -c 'sleep 987; : {marker}' &\nsleep 987\n")
    python.write_text(f'#!/bin/sh\nPATH={tools}:$PATH exec "{sys.executable}" "$@"\n')
    for path in (tools / "nvidia-smi", python):
        path.chmod(0o755)
    return python, marker


@pytest.mark.proof
def test_the_package_is_sent_once_and_again_when_damaged(hosts: Lab) -> None:
    host = hosts.start("cached")
    hosts.wait()

    request = gather.CheckRequest(level=1, expect={}, planned=["cpu"], version=trainmaster.__version__, timeout_s=60)
    machine = {"host": "127.0.0.1", "port": host.port, "key": str(hosts.key), "python": sys.executable}
    machines = parse_hosts({"known_hosts": "known_hosts", "hosts": [machine]}, hosts.folder)

    def sent() -> int:
        watch = gather.Watch()
        assert gather.gather(SshNodes(machines), request, watch=watch).overall is Overall.PASS
        return watch.transfer.sent_bytes

    size = sent()
    assert (size > 0, sent()) == (True, 0)
    (folder,) = (host.home / ".cache" / "trainmaster").iterdir()
    (folder / "trainmaster" / "checks" / "cpu.py").write_text("raise SystemExit(0)")
    assert (sent(), sent()) == (size, 0)


def test_the_servers_die_with_a_crashed_test_run(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {TESTS!r})\nfrom pathlib import Path\nimport sshd\n"
        f"made = sshd.Lab(Path({str(tmp_path)!r})); host = made.start('a'); made.wait()\n"
        "print(host.process.pid, flush=True); input()"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        os.kill(run.pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            pass

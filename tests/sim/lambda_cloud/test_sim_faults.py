"""Faults of the simulator: each on demand, and by rate and seed."""

from __future__ import annotations

import http.client
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import UsageError
from trainmaster.sim.lambda_cloud.admin import LIVE_FAULTS
from trainmaster.sim.lambda_cloud.faults import FAULTS, Faults, parse_rates

pytestmark = pytest.mark.spawns
LAUNCH = "/api/v1/instance-operations/launch"
GOOD = {"region_name": "us-south-1", "instance_type_name": "gpu_1x_h100_sxm5", "ssh_key_names": ["key"]}


# Faults of answers


def test_429_with_and_without_a_body(simulate) -> None:
    account = simulate()
    account.simulator.inject("rate-limit")
    status, body = account.call("GET", "/api/v1/instances")
    assert status == 429 and body["error"]["code"]
    account.simulator.inject("rate-limit-empty")
    assert account.call("GET", "/api/v1/instances") == (429, b"")
    limits = account.simulator.summary()["rate_limit_violations"]
    assert limits == {"requests": 0, "launches": 0}  # the client did nothing wrong


def test_500_before_anything_happened(simulate) -> None:
    account = simulate()
    account.simulator.inject("error-500", times=2)
    status, body = account.call("POST", LAUNCH, GOOD)
    assert (status, body["error"]["code"]) == (500, "global/internal-error")
    status, body = account.call("POST", LAUNCH, GOOD)
    assert status == 502 and b"Bad Gateway" in body
    assert account.get("/instances") == []


def test_500_after_the_launch_happened(simulate) -> None:
    account = simulate(boot_s=1e6)
    account.simulator.inject("launch-500")
    tags = [{"key": "nonce", "value": "n-1"}]
    assert account.get("/regions")  # not a launch: the fault waits for one
    assert account.call("POST", LAUNCH, GOOD | {"tags": tags})[0] == 500
    assert [one["tags"] for one in account.get("/instances")] == [tags]


@pytest.mark.parametrize("fault", ["launch-timeout", "launch-cut"])
def test_no_answer_after_the_launch_happened(simulate, fault: str) -> None:
    """Held for 300 to 600 simulated seconds and then cut, or cut at once."""
    account = simulate(boot_s=1e6)
    account.simulator.inject(fault)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        account.call("POST", LAUNCH, GOOD)
    assert len(account.get("/instances")) == 1
    assert account.simulator.summary()["requests_by_status"] == {"200": 1, "cut": 1}


def test_a_held_connection_outlasts_an_impatient_client(simulate) -> None:
    account = simulate(boot_s=1e6, time_factor=1.0)
    account.simulator.inject("launch-timeout")
    with pytest.raises(TimeoutError):
        account.raw("POST", LAUNCH, GOOD, timeout_s=0.5)
    assert len(account.simulator.instances()) == 1


def test_garbled_json_of_a_request_that_was_done(simulate) -> None:
    account = simulate(boot_s=1e6)
    account.simulator.inject("garbled-json")
    status, body = account.call("POST", LAUNCH, GOOD)
    assert status == 200 and isinstance(body, bytes)
    assert len(account.get("/instances")) == 1


def test_a_slow_answer(simulate) -> None:
    account = simulate(time_factor=10.0)
    account.simulator.inject("slow-answer")
    begun = time.monotonic()
    account.get("/regions")
    assert time.monotonic() - begun >= 0.2  # 2 to 10 simulated seconds


def test_the_next_request_can_be_refused_with_any_code(simulate) -> None:
    account = simulate()
    account.simulator.refuse_next(403, "global/account-inactive")
    status, body = account.call("GET", "/api/v1/instances")
    assert (status, body["error"]["code"]) == (403, "global/account-inactive")
    assert account.get("/instances") == []


# Faults of launches


def test_listed_capacity_is_refused(simulate) -> None:
    account = simulate(boot_s=1e6)
    account.simulator.inject("capacity-flicker")
    listed = account.get("/instance-types")["gpu_1x_h100_sxm5"]["regions_with_capacity_available"]
    assert "us-south-1" in [one["name"] for one in listed]
    _, body = account.call("POST", LAUNCH, GOOD)
    assert body["error"]["code"] == "instance-operations/launch/insufficient-capacity"
    account.launch()


def test_capacity_is_left_out_of_a_listing(simulate) -> None:
    account = simulate(boot_s=1e6)
    first = next(iter(account.get("/instance-types")))
    account.simulator.inject("capacity-hidden")
    sizes = [len(account.get("/instance-types")[first]["regions_with_capacity_available"]) for _ in range(2)]
    assert sizes == [1, 2]


def test_active_before_it_has_an_ip(simulate) -> None:
    account = simulate(time_factor=20.0, boot_s=5, seed=6)  # 3 s of real time and more
    account.simulator.inject("late-ip")
    instance = account.launch()
    assert "ip" not in account.wait(instance)
    account.until(lambda: "ip" in account.get(f"/instances/{instance}"))


def test_active_before_its_ssh_server(simulate) -> None:
    account = simulate(time_factor=20.0, boot_s=5, seed=6)  # 3 s of real time and more
    account.simulator.inject("ssh-late")
    shown = account.wait(account.launch())
    assert account.ssh(shown["ip"], "true").returncode == 255
    account.until(lambda: account.ssh(shown["ip"], "true").returncode == 0)


def test_stuck_booting_costs_and_can_be_terminated(simulate) -> None:
    account = simulate()
    account.simulator.inject("stuck-booting")
    instance = account.launch()
    account.until(lambda: account.simulator.summary()["billed_minutes"] > 5)
    assert account.get(f"/instances/{instance}")["status"] == "booting"
    account.terminate(instance)
    account.wait(instance, "terminated")


def test_unhealthy_instead_of_active(simulate) -> None:
    account = simulate()
    account.simulator.inject("unhealthy")
    account.wait(account.launch(), "unhealthy")
    later = account.launch()
    account.wait(later)
    account.simulator.inject("unhealthy", instance_id=later)
    account.wait(later, "unhealthy")


def test_active_with_broken_cuda_and_so_for_ever(simulate) -> None:
    account = simulate(capacity=1)
    account.simulator.inject("cuda-broken")
    for _ in range(2):  # the same hardware comes back
        instance = account.launch()
        shown = account.wait(instance)
        done = account.ssh(shown["ip"], "nvidia-smi -q -x")
        assert done.returncode == 9 and "couldn't communicate with the NVIDIA driver" in done.stdout
        account.terminate(instance)
        account.wait(instance, "terminated")


def test_cuda_breaks_later(simulate) -> None:
    account = simulate()
    instance = account.launch()
    shown = account.wait(instance)
    assert account.ssh(shown["ip"], "nvidia-smi").returncode == 0
    account.simulator.inject("cuda-broken", instance_id=instance)
    assert account.ssh(shown["ip"], "nvidia-smi").returncode == 9


def test_somebody_else_has_an_instance_of_the_same_name(simulate) -> None:
    account = simulate(boot_s=1e6)
    account.simulator.inject("duplicate-name")
    ours = account.launch(name="job-7", tags=[{"key": "nonce", "value": "n-1"}])
    listed = account.get("/instances")
    assert [one["name"] for one in listed] == ["job-7", "job-7"]
    (foreign,) = (one for one in listed if one["id"] != ours)
    assert foreign["tags"] == [] and foreign["status"] == "active"
    summary = account.simulator.summary()
    assert summary["launches"] == 1 and summary["foreign_touched"] == []
    account.terminate(foreign["id"])
    assert account.simulator.summary()["foreign_touched"] == [f"terminate {foreign['id']}"]


def test_instances_of_somebody_else_leave_the_capacity_to_the_account(simulate) -> None:
    """They were never terminated: in a long run with few places nothing could be launched any more."""
    account = simulate(boot_s=1e6, capacity=2)
    account.simulator.inject("duplicate-name")
    account.launch(name="job-7")
    assert len(account.get("/instances")) == 2
    account.launch(name="job-8")


def test_an_ip_address_comes_back_with_another_host_key(simulate) -> None:
    account = simulate()
    account.simulator.inject("ip-reuse")  # waits until there is an address to reuse
    seen = []
    for _ in range(2):
        instance = account.launch()
        shown = account.wait(instance)
        words = ["ssh-keyscan", "-p", str(account.simulator.ssh_port), shown["ip"]]
        key = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[2]
        seen.append((shown["ip"], key))
        account.terminate(instance)
        account.wait(instance, "terminated")
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


# Faults of running instances


def test_preempted(simulate) -> None:
    account = simulate()
    instance = account.launch()
    shown = account.wait(instance)
    account.simulator.inject("preempted", instance_id=instance)
    account.wait(instance, "preempted")
    account.until(lambda: account.simulator.instances()[0]["processes"] == "gone")
    assert account.ssh(shown["ip"], "true").returncode == 255
    billed = account.simulator.instances()[0]["cost_usd"]
    account.terminate(instance)
    account.wait(instance, "terminated")
    assert account.simulator.instances()[0]["cost_usd"] == billed  # nothing after the preemption


def test_terminated_behind_our_back(simulate) -> None:
    account = simulate()
    instance = account.launch()
    account.wait(instance)
    account.simulator.inject("terminated", instance_id=instance)
    account.wait(instance, "terminated")
    assert account.simulator.instances()[0]["ended_by"] == "fault"


def test_a_cut_link_in_the_middle_of_a_transfer_spares_programs(simulate, tmp_path: Path) -> None:
    account = simulate()
    instance = account.launch()
    shown = account.wait(instance)
    home = Path(account.simulator.instances()[0]["home"])
    account.ssh(shown["ip"], "(setsid sh -c 'echo $$ > pid; exec sleep 98770' < /dev/null > /dev/null 2>&1 &)")
    pid = account.until(lambda: (home / "pid").exists() and (home / "pid").read_text().strip())
    user = account.simulator.environment()["LAMBDA_SSH_USER"]
    words = ["ssh", *account.ssh_options(), "-p", str(account.simulator.ssh_port), f"{user}@{shown['ip']}"]
    with subprocess.Popen([*words, "cat > big"], stdin=subprocess.PIPE) as sending:
        assert sending.stdin is not None
        sending.stdin.write(b"x" * 50_000)
        sending.stdin.flush()
        account.until(lambda: (home / "big").exists() and (home / "big").stat().st_size)
        account.simulator.inject("link-cut", instance_id=instance)
        assert sending.wait(timeout=20) == 255
        sending.stdin.close()
    assert Path(f"/proc/{pid}").exists()
    assert account.ssh(shown["ip"], "true").returncode == 0  # the link is back


# Rates, seeds, names


def test_rates_are_parsed() -> None:
    assert parse_rates("none") == {}
    assert parse_rates("launch-500=0.2, link-cut=1") == {"launch-500": 0.2, "link-cut": 1.0}
    assert parse_rates("all,slow-answer=0")["slow-answer"] == 0
    assert set(parse_rates("all")) == set(FAULTS)
    for text, says in (("bad=1", "no such fault"), ("link-cut=2", "from 0 to 1"), ("link-cut=x", "from 0 to 1")):
        with pytest.raises(UsageError, match=says):
            parse_rates(text)


def test_the_same_seed_gives_the_same_faults() -> None:
    def draw(seed: int) -> list[Any]:
        faults = Faults(seed=seed, rates=parse_rates("all"))
        return [(name, faults.happens(name), faults.delay_s(name)) for _ in range(50) for name in FAULTS]

    assert draw(7) == draw(7) != draw(8)


def test_arming_a_fault_shifts_no_draw() -> None:
    plain, armed = (Faults(seed=3, rates={"slow-answer": 0.3}) for _ in range(2))
    armed.arm("slow-answer", times=2)
    first, second = ([faults.happens("slow-answer") for _ in range(40)] for faults in (plain, armed))
    assert second[:2] == [True, True] and second[2:] == first[2:]


def test_rates_make_faults_at_their_rate(simulate) -> None:
    account = simulate(faults={"rate-limit": 0.5}, seed=1)
    statuses = [account.call("GET", "/api/v1/regions")[0] for _ in range(60)]
    assert 15 <= statuses.count(429) <= 45
    assert account.simulator.summary()["faults_injected"] == {"rate-limit": statuses.count(429)}


def test_a_planned_fault_comes_while_the_instance_runs(simulate) -> None:
    account = simulate(faults={"preempted": 1.0})
    account.wait(account.launch(), "preempted")


# The simulator's own paths


def test_faults_over_http(simulate) -> None:
    account = simulate(boot_s=1e6)
    status, body = account.call("POST", "/sim/faults", {"fault": "rate-limit", "times": 2})
    assert status == 200 and body["armed"] == {"rate-limit": 2}
    assert [account.call("GET", "/api/v1/regions")[0] for _ in range(3)] == [429, 429, 200]
    instance = account.launch(name="one")
    account.call("POST", "/sim/faults", {"fault": "terminated", "instance_id": instance})
    account.wait(instance, "terminated")
    account.call("POST", "/sim/faults", {"rates": {"error-500": 1}})
    assert account.call("GET", "/api/v1/regions")[0] == 500
    account.call("POST", "/sim/faults", {"rates": {"error-500": 0}})
    account.call("POST", "/sim/faults", {"refuse": {"status": 403, "code": "global/forbidden"}})
    assert account.call("GET", "/api/v1/instances")[0] == 403
    assert account.call("POST", "/sim/foreign", {"name": "theirs"})[1]["foreign"] is True
    assert [one["name"] for one in account.call("GET", "/sim/instances")[1]] == ["one", "theirs"]
    for wrong in ({}, {"fault": "none"}, {"fault": "rate-limit", "instance_id": instance}, {"rates": {"x": 1}}):
        assert account.call("POST", "/sim/faults", wrong)[0] == 400
    assert account.call("GET", "/sim/nothing")[0] == 404


def test_live_faults_are_faults() -> None:
    assert set(LIVE_FAULTS) < set(FAULTS)

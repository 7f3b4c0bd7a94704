"""Instances of the simulator are real: an SSH server, a home folder and an nvidia-smi each, all gone afterwards."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from trainmaster.node.parse import kernel_log

pytestmark = pytest.mark.spawns


def pids_of(words: str) -> list[int]:
    """Processes whose command line is these words."""
    wanted = words.encode().replace(b" ", b"\0") + b"\0"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == wanted:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_an_instance_boots_answers_over_ssh_and_ends(simulate) -> None:
    account = simulate()
    instance = account.launch(name="one", hostname="gpu-one", tags=[{"key": "nonce", "value": "n-1"}])
    shown = account.wait(instance)
    assert shown["name"] == "one" and shown["tags"] == [{"key": "nonce", "value": "n-1"}]
    home = account.simulator.instances()[0]["home"]
    done = account.ssh(shown["ip"], "pwd; echo $HOME; hostname; echo $TMPDIR; python3 -c 'print(6 * 7)'")
    assert done.stdout.split() == [home, home, "gpu-one", f"{home}/tmp", "42"], done.stderr
    assert account.ssh(shown["ip"], "exit 7").returncode == 7
    account.terminate(instance)
    account.wait(instance, "terminated")
    assert not Path(home).exists()
    with pytest.raises(OSError), socket.create_connection((shown["ip"], account.simulator.ssh_port), timeout=5):
        pass


def test_a_booting_instance_has_no_address(simulate) -> None:
    account = simulate(boot_s=1e6)
    begun = account.get(f"/instances/{account.launch()}")
    assert begun["status"] == "booting" and "ip" not in begun


def test_instances_have_own_host_keys_homes_and_gpus(simulate) -> None:
    account = simulate()
    ids = [account.launch(instance_type_name="gpu_8x_h100_sxm5") for _ in range(2)]
    shown = [account.wait(instance) for instance in ids]
    assert len({one["ip"] for one in shown}) == 2
    port = str(account.simulator.ssh_port)
    scans = [
        subprocess.run(
            ["ssh-keyscan", "-p", port, one["ip"]], capture_output=True, text=True, check=True
        ).stdout.split()[2]
        for one in shown
    ]
    assert len(set(scans)) == 2
    account.ssh(shown[0]["ip"], "echo mine > file")
    assert account.ssh(shown[1]["ip"], "cat file").returncode != 0
    lists = [account.ssh(one["ip"], "nvidia-smi -L").stdout for one in shown]
    assert [text.count("NVIDIA H100 80GB HBM3") for text in lists] == [8, 8]
    assert lists[0] != lists[1]  # UUIDs


def test_the_kernel_log_of_an_instance_begins_with_its_own_boot(simulate) -> None:
    account = simulate()
    log = kernel_log.parse(account.ssh(account.wait(account.launch())["ip"], "dmesg").stdout)
    assert log.from_boot and log.lines < 10, "the log of the machine that simulates may have lost its beginning"
    assert not (log.xids or log.events or log.faults)


def test_only_the_key_of_the_launch_is_let_in(simulate, tmp_path: Path) -> None:
    account = simulate()
    shown = account.wait(account.launch())
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    refused = account.ssh(shown["ip"], "true", key=other)
    assert refused.returncode == 255 and "Permission denied" in refused.stderr


def test_files_arrive_in_the_home_folder(simulate, tmp_path: Path) -> None:
    account = simulate()
    shown = account.wait(account.launch())
    (tmp_path / "file").write_text("content")
    user = account.simulator.environment()["LAMBDA_SSH_USER"]
    words = ["scp", "-q", *account.ssh_options(), "-P", str(account.simulator.ssh_port)]
    subprocess.run([*words, str(tmp_path / "file"), f"{user}@{shown['ip']}:up.txt"], check=True, timeout=30)
    assert account.ssh(shown["ip"], "cat up.txt").stdout == "content"


def test_termination_ends_daemons_that_hide(simulate) -> None:
    """A program in a session of its own, reparented and without its environment, is still found."""
    account = simulate()
    instance = account.launch()
    shown = account.wait(instance)
    nothing = "< /dev/null > /dev/null 2>&1"
    account.ssh(shown["ip"], f"(setsid sleep 98761 {nothing} &); (env -i setsid /bin/sleep 98762 {nothing} &)")
    account.until(lambda: pids_of("sleep 98761") and pids_of("/bin/sleep 98762"))
    account.terminate(instance)
    account.wait(instance, "terminated")
    assert pids_of("sleep 98761") == pids_of("/bin/sleep 98762") == []


def test_a_restart_ends_processes_and_keeps_files(simulate) -> None:
    account = simulate()
    instance = account.launch()
    shown = account.wait(instance)
    account.ssh(shown["ip"], "echo kept > file; (setsid sleep 98763 < /dev/null > /dev/null 2>&1 &)")
    account.until(lambda: pids_of("sleep 98763"))
    restarted = account.post("/instance-operations/restart", {"instance_ids": [instance]})["restarted_instances"]
    assert [one["status"] for one in restarted] == ["booting"]
    account.until(lambda: not pids_of("sleep 98763"))
    account.wait(instance)
    assert account.ssh(shown["ip"], "cat file").stdout == "kept\n"


def test_a_file_system_is_shared_and_stays(simulate) -> None:
    account = simulate()
    made = account.post("/filesystems", {"name": "shared", "region": "us-south-1"})
    first = account.launch(file_system_names=["shared"])
    account.ssh(account.wait(first)["ip"], "echo kept > shared/file")
    assert [one["is_in_use"] for one in account.get("/file-systems")] == [True]
    account.terminate(first)
    account.wait(first, "terminated")
    mounts = [{"mount_point": "/data/x", "file_system_id": made["id"]}]
    second = account.wait(account.launch(file_system_mounts=mounts))
    assert second["file_system_mounts"] == mounts
    assert account.ssh(second["ip"], "cat shared/file").stdout == "kept\n"


def test_an_instance_whose_server_cannot_start_stays_booting_with_the_reason(simulate) -> None:
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen()
        account = simulate(ssh_port=busy.getsockname()[1])
        instance = account.launch()
        account.until(lambda: account.simulator.instances()[0]["wrong"])
    assert "Address already in use" in account.simulator.instances()[0]["wrong"]
    assert account.get(f"/instances/{instance}")["status"] == "booting"
    account.terminate(instance)
    account.wait(instance, "terminated")


def test_hardware_returns_with_its_serials(simulate) -> None:
    account = simulate(capacity=1)
    serials = []
    for _ in range(2):
        instance = account.launch()
        shown = account.wait(instance)
        serials.append(
            account.ssh(shown["ip"], "nvidia-smi --query-gpu=serial,memory.total --format=csv,noheader").stdout
        )
        account.terminate(instance)
        account.wait(instance, "terminated")
    assert serials[0] == serials[1] and serials[0].endswith(" MiB\n")

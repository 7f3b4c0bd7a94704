"""Each GPU is whole and open to compute: no MIG, no prohibited compute mode, persistence on."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.checks import nvidia
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
MIG = "mig_mode/current_mig"
OPEN = ("Default", "Exclusive_Process", "Exclusive_Thread")


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect))


def _judge_one(gpu: nvidia.Gpu, device: str, expect: Expect) -> list[Finding]:
    modes = {
        "mig": gpu.said(MIG) or "N/A",
        "compute": gpu.word("compute_mode"),
        "persistence": gpu.said("persistence_mode"),
    }
    found = [*_compute(modes["compute"], device), *_mig(gpu, device, expect.mig), *_persistence(gpu, device, expect)]
    if found:
        return found
    return [
        ok(
            f"compute mode {modes['compute']}, MIG {modes['mig']}, persistence {modes['persistence']}",
            device=device,
            **modes,
        )
    ]


def _compute(mode: str, device: str) -> Iterator[Finding]:
    if mode == "Prohibited":
        action = "open it: nvidia-smi -c 0"
        yield fail("no program may compute on it (compute mode Prohibited)", action=action, device=device, compute=mode)
    elif mode not in OPEN:
        yield error(f"unknown compute mode {mode[:40]}", action="set it: nvidia-smi -c 0", device=device, compute=mode)


def _mig(gpu: nvidia.Gpu, device: str, wanted: bool | None) -> Iterator[Finding]:
    on = gpu.yes(MIG) if gpu.tells(MIG) else False
    if on != bool(wanted):
        reason = "MIG is on: a program sees slices, not the GPU" if on else "MIG is off"
        yield fail(reason, action=f"change it and reset the GPU: nvidia-smi -mig {int(not on)}", device=device, mig=on)
    elif gpu.tells(MIG) and gpu.yes("mig_mode/pending_mig") != on:
        action = "reset the GPU, or take the change back"
        yield warn("a change of MIG waits for a reset", action=action, device=device, mig=on)


def _persistence(gpu: nvidia.Gpu, device: str, expect: Expect) -> Iterator[Finding]:
    known = gpu.tells("persistence_mode") or not gpu.said("persistence_mode")  # N/A: Windows has none
    if expect.persistence is not False and known and not gpu.yes("persistence_mode"):
        say = fail if expect.persistence else warn
        reason = "persistence mode is off: the driver unloads between jobs and forgets its settings"
        yield say(reason, action="turn it on: nvidia-smi -pm 1", device=device, persistence=False)

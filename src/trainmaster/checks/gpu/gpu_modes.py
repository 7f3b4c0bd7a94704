"""Each GPU is whole and open to compute: no MIG, no prohibited compute mode, persistence on."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import setting
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("mig", "persistence")
COMPARES = (
    setting("mig", "MIG mode", alike=True),
    setting("compute", "compute mode", alike=True),
    setting("persistence", "persistence mode", alike=True),
)
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
MIG = nvidia.MIG
OPEN = ("Default", "Exclusive_Process", "Exclusive_Thread")

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect, gpus))


def _judge_one(gpu: nvidia.Gpu, device: str, expect: Expect, gpus: nvidia.Gpus) -> list[Finding]:
    modes = {
        "mig": gpu.text(MIG) or "N/A",
        "compute": gpu.text("compute_mode"),
        "persistence": gpu.text("persistence_mode"),
    }
    findings: list[Finding] = []
    for part in (_compute(modes["compute"], device), _mig(gpu, device, expect), _persistence(gpu, device, expect)):
        try:
            findings += part
        except nvidia.NotReported as exc:  # one mode that is not reported hides no fault of another
            findings.append(error(str(exc), action=nvidia.RESET_OR_REBOOT, device=device))
    if findings:
        return findings
    if not gpu.reports(nvidia.MIG) and (expect.mig or nvidia.peers_report(gpus, gpu, nvidia.MIG) or _has_mig(gpu)):
        gpu.yes(nvidia.MIG)  # it must report its mode; N/A is no answer
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
        yield fail("compute mode Prohibited: no program may use it", action=action, device=device, compute=mode)
    elif mode not in OPEN:
        yield error(
            f"unknown compute mode {mode[:40] or '(none)'}",
            action="set it: nvidia-smi -c 0",
            device=device,
            compute=mode,
        )


def _has_mig(gpu: nvidia.Gpu) -> bool:
    """Whether its model can be divided (NVIDIA, MIG user guide): those with HBM from Ampere on."""
    model = profiles.of_gpu(gpu.name)
    return (
        model is not None
        and (model.memory_kind or "").startswith("HBM")
        and model.generation not in nvidia.RETIRES_PAGES
    )


def _mig(gpu: nvidia.Gpu, device: str, expect: Expect) -> Iterator[Finding]:
    if not gpu.reports(MIG):
        return
    on = gpu.yes(MIG)
    if on != bool(expect.mig):
        reason = "MIG is on: a program sees slices, not the GPU" if on else "MIG is off"
        yield fail(reason, action=f"change it and reset the GPU: nvidia-smi -mig {int(not on)}", device=device, mig=on)
    elif on and not gpu.mig_devices:
        reason = "MIG is on and there is no MIG device: no program can use this GPU"
        yield fail(reason, action="create them: nvidia-smi mig -cgi PROFILE -C", device=device, mig=on, mig_devices=0)
    elif gpu.yes("mig_mode/pending_mig") != on:
        action = "reset the GPU, or undo the change"
        yield warn("a change of the MIG mode is pending a reset", action=action, device=device, mig=on)


def _persistence(gpu: nvidia.Gpu, device: str, expect: Expect) -> Iterator[Finding]:
    if expect.persistence is not False and not gpu.yes("persistence_mode"):
        say = fail if expect.persistence else warn
        reason = "persistence mode is off: the driver unloads between jobs and loses its settings"
        yield say(reason, action="turn it on: nvidia-smi -pm 1", device=device, persistence=False)

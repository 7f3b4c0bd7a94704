"""Each GPU behind NVSwitches is registered with a healthy fabric. Without it CUDA does not start."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.checks import nvidia
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
SERVICE = "nvidia-fabricmanager"
START = f"start the fabric manager: systemctl restart {SERVICE}"
RESET = "drain the node; reset all its GPUs and NVSwitches together"
# What each part of the health says where nothing is wrong (nvmlGpuFabricInfo_v3).
HEALTHY = {
    "summary": {"Healthy"},
    "bandwidth": {"Full"},
    "route_recovery_in_progress": {"False", "No"},
    "route_unhealthy": {"False", "No"},
    "access_timeout_recovery": {"False", "No"},
    "incorrect_configuration": {"None", "False", "No"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """`service` is the state of the fabric manager; None: nobody could be asked."""

    gpus: nvidia.Gpus
    service: str | None


def read(host: Host) -> Evidence:
    gpus = nvidia.read(host)
    service = None
    if gpus.switches:
        try:
            service = host.run("systemctl", "is-active", SERVICE).stdout.strip() or None
        except HostError:
            service = None  # a container has no systemd; the GPUs themselves tell from Hopper on
    return Evidence(gpus=gpus, service=service)


def judge(evidence: Evidence, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(
        evidence.gpus, expect, lambda gpu, device: _judge_one(gpu, device, evidence, expect.fabric)
    )


def _judge_one(gpu: nvidia.Gpu, device: str, evidence: Evidence, wanted: bool | None) -> Finding:
    if not gpu.tells("fabric/state"):
        return _judge_service(device, evidence, wanted)
    state, status = gpu.word("fabric/state"), gpu.said("fabric/status")
    if state != "Completed":
        return fail(f"its fabric state is {state[:40]}", action=START, device=device, state=state, status=status)
    if status != "Success":
        reason = f"it joined the fabric with {status[:40] or 'no status'}"
        return fail(reason, action=RESET, device=device, state=state, status=status)
    for name, good in HEALTHY.items():
        path = f"fabric/health/{name}"
        if gpu.tells(path) and gpu.word(path) not in good:
            reason = f"its fabric is not healthy: {name.replace('_', ' ')} {gpu.word(path)[:40]}"
            return fail(reason, action=RESET, device=device, state=state, status=status)
    return ok("registered with the fabric", device=device, state=state, status=status)


def _judge_service(device: str, evidence: Evidence, wanted: bool | None) -> Finding:
    """GPUs before Hopper tell no fabric state; then the service is what is known."""
    service = evidence.service
    if service == "active":
        return ok("the fabric manager runs", device=device, service=service)
    if service in ("inactive", "failed", "deactivating"):
        reason = f"the fabric manager is {service} and the node has {len(evidence.gpus.switches)} NVSwitches"
        return fail(reason, action=START, device=device, service=service)
    if wanted:
        return error("it tells no fabric state", action="update the NVIDIA driver", device=device, service=service)
    return skip("it tells no fabric state: it stands behind no NVSwitch, or cannot be asked here", device=device)

"""All GPUs of a model have the same, intact firmware. A different or damaged one behaves differently under load."""

from __future__ import annotations

from trainmaster.checks import nvidia
from trainmaster.checks.comparison import firmware
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("vbios",)
COMPARES = (firmware("vbios", "VBIOS"), firmware("gsp", "GSP firmware"), firmware("inforom", "InfoROM"))
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    findings = nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus, expect.vbios))
    known = gpus.smi.broken_inforom if gpus.smi else ()
    corrupted = [line for line in gpus.warnings if "inforom is corrupted" in line.lower()]
    if len(corrupted) > len(known):
        # A warning whose address cannot be read still is about one of the GPUs.
        action = "run nvidia-smi by hand; take the GPU that it names out of service"
        findings.append(fail(f"the infoROM of a GPU is corrupted: {corrupted[0][:120]}", action=action))
    versions: dict[str | None, set[str]] = {}
    for gpu in gpus.smi.gpus if gpus.smi else ():
        versions.setdefault(gpu.name, set()).add(gpu.text("vbios_version"))
    if expect.vbios is None and any(len(of_model) > 1 for of_model in versions.values()):
        mixed = sorted(version for of_model in versions.values() if len(of_model) > 1 for version in of_model)
        action = "bring every GPU to the same firmware"
        findings.append(warn(f"GPUs of one model have different VBIOS: {', '.join(mixed)}", action=action))
    return findings


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus, wanted: str | None) -> Finding:
    values = {
        "vbios": gpu.text("vbios_version"),
        "inforom": gpu.text("inforom_version/img_version"),
        "gsp": gpu.text("gsp_firmware_version"),
    }
    assert gpus.smi is not None
    if gpu.bus in gpus.smi.broken_inforom:
        action = nvidia.REPLACE
        return fail(
            "its infoROM is corrupted: it loses its error history and limits", action=action, device=device, **values
        )
    version = gpu.word("vbios_version")
    if wanted is not None and version.lower() != wanted.lower():
        return fail(f"VBIOS {version}, not {wanted}", action=f"update it to {wanted}", device=device, **values)
    gsp = values["gsp"]
    if gpu.reports("gsp_firmware_version") and gpus.smi.driver is not None and gsp != gpus.smi.driver:
        reason = f"its GSP firmware {gsp} is not the driver's {gpus.smi.driver}"
        return warn(reason, action="reboot the node so that driver and firmware match", device=device, **values)
    return ok(f"VBIOS {version}", device=device, **values)

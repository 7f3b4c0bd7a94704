"""All expected GPUs are here and answer."""

from __future__ import annotations

import re

from trainmaster.checks import nvidia
from trainmaster.checks.comparison import EqualValue
from trainmaster.checks.contract import VERDICT
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("gpus",)
COMPARES = (
    EqualValue(
        name="listed", words="GPU count", verdict=Verdict.FAIL, action="see gpu_count on this node", everywhere=True
    ),
)
METRICS = {
    "summary.test_results.gpu_detection": VERDICT,
    "node_info.gpus_per_host": "expected",
    "gpu.name": "model",  # in documents of earlier versions; gpu_model reports it now
}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# What nvidia-smi prints, with exit code 0, of a GPU that it cannot open.
_HANDLE = re.compile(r"Unable to determine the device handle for (?:GPU|gpu)\w*\s*(?P<address>[0-9A-Fa-f:.]{7,20})?.*")
_LOST = "look for Xid 79 in the kernel log; power-cycle the node, then replace the GPU"

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    lost = [_no_handle(line) for line in gpus.warnings if _HANDLE.search(line)]
    refused = nvidia.refuse(gpus, expect)
    if refused is not None:
        return lost or [refused]
    assert gpus.smi is not None
    count, listed = nvidia.expected(gpus, expect), len(gpus.smi.gpus)
    findings = [_present(slot.gpu, slot.device) if slot.gpu else _missing(slot) for slot in nvidia.slots(gpus, count)]
    findings += [*lost, *nvidia.ended_badly(gpus)]
    strangers = [gpu.bus for gpu in gpus.smi.gpus if gpus.bus and gpu.bus not in gpus.bus]
    if strangers:
        reason = f"nvidia-smi lists a GPU at {strangers[0]}, which the PCI bus does not show"
        findings.append(error(reason, action="read the PCI bus again; reboot the node if it stays"))
    if gpus.foreign:
        reason = (
            f"beside its NVIDIA GPUs this machine has accelerators that no check supports: {nvidia.name_foreign(gpus)}"
        )
        # Who states the number of GPUs knows of them; they were not checked all the same.
        say = error if expect.gpus is None else warn
        findings.append(say(reason, action="check them with the vendor's tools; state gpus=N if they do no work here"))
    if listed == count and gpus.smi.attached == listed:
        return [ok(f"{listed} of {count} GPUs", listed=listed, expected=count), *findings]
    shown = f"{listed} of {count} GPUs: nvidia-smi lists {listed} and counts {gpus.smi.attached}, "
    return [
        fail(
            shown + f"the PCI bus shows {len(gpus.bus)}",
            action="drain the node and reboot it; if this process has only some of them, state it: --expect gpus=N",
            listed=listed,
            attached=gpus.smi.attached,
            on_bus=len(gpus.bus),
            expected=count,
        ),
        *findings,
    ]


def _present(gpu: nvidia.Gpu, device: str) -> Finding:
    if gpu.lost is not None:
        return fail(f"the GPU at {gpu.bus} does not answer: {gpu.lost}", action=_LOST, device=device, bus=gpu.bus)
    if not nvidia.has_uuid(gpu):
        action = "run nvidia-smi by hand; reset the GPU or reboot the node"
        return error(f"the GPU at {gpu.bus} has no readable UUID", action=action, device=device, bus=gpu.bus)
    return ok(f"at {gpu.bus}", device=device, bus=gpu.bus, uuid=gpu.uuid)


def _missing(slot: nvidia.Slot) -> Finding:
    where = f"at {slot.bus} " if slot.bus else ""
    return fail(f"missing: nvidia-smi lists no GPU {where}in its place", action=_LOST, device=slot.device)


def _no_handle(line: str) -> Finding:
    return fail(f"nvidia-smi cannot open a GPU: {line[:160]}", action=_LOST)

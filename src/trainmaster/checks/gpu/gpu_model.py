"""Each GPU is the model it should be, and all are alike. One slower GPU slows every step of all the others."""

from __future__ import annotations

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import EqualValue
from trainmaster.checks.contract import VERDICT
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, fail, ok, warn

LEVEL = 1
GPU = True
EXPECTS = ("gpu_model",)
COMPARES = (
    EqualValue(
        name="model",
        words="GPU model",
        verdict=Verdict.FAIL,
        action="use nodes of one type, or check each type separately",
        everywhere=True,
    ),
)
METRICS = {"summary.test_results.gpu_detection": VERDICT, "gpu.name": "model"}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    findings = nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect.gpu_model))
    models = {gpu.name for gpu in gpus.smi.gpus if gpu.name} if gpus.smi else set()
    if len(models) > 1:
        reason = f"the GPUs differ: {', '.join(sorted(models))}"
        findings.append(warn(reason, action="train on GPUs of one model, or state the model: --expect gpu_model=NAME"))
    return findings


def _judge_one(gpu: nvidia.Gpu, device: str, wanted: str | None) -> Finding:
    if gpu.name is None:
        return error("it reports no product name", action=nvidia.RESET_OR_REBOOT, device=device)
    if not nvidia.has_uuid(gpu):
        return error("it has no readable UUID", action=nvidia.RESET_OR_REBOOT, device=device)
    values = {"model": gpu.name, "uuid": gpu.uuid, "bus": gpu.bus, "serial": gpu.text("serial")}
    if wanted is not None and not profiles.is_model(gpu.name, wanted):
        return fail(f"{gpu.name}, not {wanted}", action="use a node of the right type", device=device, **values)
    return ok(gpu.name, device=device, **values)

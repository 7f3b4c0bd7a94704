"""ECC is on and has met no error it could not correct. Such an error ends the job, or corrupts it where ECC is off."""

from __future__ import annotations

from trainmaster.checks import nvidia, profiles
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
REPLACE = "take the GPU out of service and have it replaced"
RESET = "drain the node and reset the GPU"
FLAGS = {
    "ecc_errors/aggregate/sram_threshold_exceeded": ("its SRAM passed the vendor's error threshold", REPLACE),
    "ecc_errors/unrepairable_memory": ("its memory cannot be repaired any more", REPLACE),
    "ecc_errors/channel_repair_pending": ("a memory channel waits to be repaired", RESET),
    "ecc_errors/tpc_repair_pending": ("a part of its processor waits to be repaired", RESET),
}
# Page-retiring GPUs count by bits, later ones by kind of memory; without both of a kind half was not measured.
MUST_TELL = (("dram_uncorrectable", "double_bit"), ("sram_uncorrectable", "double_bit"))
CORRECTED_WARN = 10_000  # ours: healthy memory shows few; none of them hurt a result


def read(host: Host) -> nvidia.Gpus:
    return nvidia.read(host)


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, expect.ecc))


def _judge_one(gpu: nvidia.Gpu, device: str, wanted: bool | None) -> Finding:
    if not gpu.tells("ecc_mode/current_ecc") and wanted:
        return fail("it has no ECC", action="use a GPU with ECC", device=device)
    if not gpu.yes("ecc_mode/current_ecc"):
        if wanted is False or (wanted is None and profiles.of_gpu(gpu.name) is None):
            # Workstation boards are sold with ECC off; every model that is known here is sold with it on.
            return ok("ECC is off, and nothing asks for it", device=device, ecc=False)
        say = fail if wanted else warn
        return say("ECC is off", action="turn it on and reset the GPU: nvidia-smi -e 1", device=device, ecc=False)
    for flag, (meaning, action) in FLAGS.items():
        if gpu.tells(flag) and gpu.yes(flag):
            return fail(meaning, action=action, device=device)
    counts = _counts(gpu)
    now = {name: count for name, count in counts.items() if name.startswith("volatile") and count}
    hard = {name: count for name, count in now.items() if _is_hard(name)}
    if hard:
        reason = f"errors that ECC could not correct since the last reset: {_say(hard)}"
        return fail(reason, action="drain the node and reset the GPU; replace it if they return", device=device, **hard)
    old = {name: count for name, count in counts.items() if name.startswith("aggregate") and count and _is_hard(name)}
    if old:
        reason = f"errors that ECC could not correct in its life: {_say(old)}"
        return warn(reason, action="run --level 3 on it before a long job", device=device, **old)
    many = {name: count for name, count in now.items() if count >= CORRECTED_WARN}
    if many:
        reason = f"many corrected errors since the last reset: {_say(many)}"
        return warn(reason, action="run --level 3 on it before a long job", device=device, **many)
    return ok("ECC is on, no error that it could not correct", device=device, ecc=True, **now)


def _counts(gpu: nvidia.Gpu) -> dict[str, int]:
    """Every counter by name: `volatile dram_uncorrectable`. Schemas name and group them in many ways."""
    paths = [path for path in gpu.leaves if path.startswith(("ecc_errors/volatile", "ecc_errors/aggregate/"))]
    counters = [path for path in paths if "correctable" in path or "_bit/" in path]
    counts = {
        path.removeprefix("ecc_errors/").replace("/", " "): int(gpu.number("", path))
        for path in counters
        if gpu.tells(path)
    }
    for kinds in MUST_TELL:
        if not any(f"volatile {kind}" in name for name in counts for kind in kinds):
            raise nvidia.NotTold("ecc_errors/volatile", f"no count of {kinds[0]}", applies=True)
    return counts


def _is_hard(name: str) -> bool:
    return "uncorrectable" in name or "double_bit" in name


def _say(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())

"""ECC is on and counted no uncorrectable error. Such an error ends the job; without ECC it corrupts the job unseen."""

from __future__ import annotations

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import hardware
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn

LEVEL = 1
GPU = True
EXPECTS = ("ecc",)
COMPARES = (hardware("ecc", "ECC mode", "switch ECC on as on the others (nvidia-smi -e 1), then reset the GPUs"),)
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
FLAGS = {
    "ecc_errors/aggregate/sram_threshold_exceeded": ("its SRAM exceeded the vendor's error threshold", nvidia.REPLACE),
    "ecc_errors/unrepairable_memory": ("its memory is unrepairable", nvidia.REPLACE),
    "ecc_errors/channel_repair_pending": ("a memory channel repair is pending", nvidia.RESET),
    "ecc_errors/tpc_repair_pending": ("a TPC repair is pending", nvidia.RESET),
}
SOURCES = "ecc_errors/aggregate_uncorrectable_sram_sources"
PARTNERS = (
    (SOURCES, "ecc_errors/aggregate/sram_threshold_exceeded"),
    ("ecc_errors/channel_repair_pending", "ecc_errors/tpc_repair_pending"),
)
_HALVES = ("ecc_errors/volatile/", "ecc_errors/aggregate/")
# Page-retiring GPUs count by bits, later ones by kind of memory; without both of a kind half was not measured.
# Of the counters by bits, the total or that of the device memory counts: caches alone are a part.
_BITS = ("double_bit total", "double_bit device_memory")
MUST_TELL = (("dram_uncorrectable", *_BITS), ("sram_uncorrectable", *_BITS))
MIG_COUNT = "ecc_error_count/volatile_count/sram_uncorrectable"
CURRENT, PENDING = "ecc_mode/current_ecc", "ecc_mode/pending_ecc"
CORRECTED_WARN = 10_000  # ours: healthy memory shows few; none of them changes a result
TURN_ON = "turn it on and reset the GPU: nvidia-smi -e 1"

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus, expect.ecc))


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus, wanted: bool | None) -> Finding:
    counts, unread = _counts(gpu)
    # Errors that were counted are judged first: no missing value hides them.
    finding = _judge_errors(gpu, device, counts)
    if finding is not None and finding.verdict is not Verdict.WARN:
        return finding
    mode = _judge_mode(gpu, device, gpus, wanted)
    if mode is not None and mode.verdict is not Verdict.WARN:
        return mode
    unread += [*_only_of_peers(gpu, gpus), *_without_partner(gpu)]
    missing = [
        kinds[0] for kinds in MUST_TELL if not any(f"volatile {kind}" in name for name in counts for kind in kinds)
    ]
    in_mig = bool(gpu.mig_devices) and all(MIG_COUNT in mig_device for mig_device in gpu.mig_devices)
    if unread or (missing and not (nvidia.mig_on(gpu) and in_mig)):
        if nvidia.mig_on(gpu) and not gpu.mig_devices and not unread:
            return skip("no MIG device counts errors", proof="MIG is Enabled and mig_devices is empty", device=device)
        what = f"it does not report {unread[0] if unread else f'volatile {missing[0]}'.replace('_', ' ')}"
        return error(f"ECC: {what}", action=nvidia.RESET_OR_REBOOT, device=device)
    now = {name: count for name, count in counts.items() if name.startswith("volatile") and count}
    return finding or mode or ok("ECC is on, no uncorrectable error", device=device, ecc=True, **now)


def _judge_mode(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus, wanted: bool | None) -> Finding | None:
    """Finding about the mode: off, about to be off, or not reported. None: it is on."""
    known = profiles.of_gpu(gpu.name) is not None or nvidia.peers_report(gpus, gpu, CURRENT)
    if not gpu.reports(CURRENT):
        if wanted and gpu.text(CURRENT) and nvidia.is_desktop(gpu):
            return fail("it has no ECC", action="use a GPU with ECC", device=device)
        if not known and not wanted and gpu.text(CURRENT) and nvidia.is_desktop(gpu):
            proof = f"it is a {gpu.name}, and its ECC mode is {gpu.text(CURRENT)}"
            return skip("a desktop board without ECC", proof=proof, device=device)
    on = gpu.yes(CURRENT)
    others = [other for other in nvidia.same_model(gpus, gpu) if other.text(CURRENT) == "Enabled"]
    if not on:
        if wanted is False or (wanted is None and not others and nvidia.is_desktop(gpu)):
            return ok("ECC is off, and nothing requires it", device=device, ecc=False)
        say = fail if wanted or others else warn
        beside = f", and on in {len(others)} equal GPUs" if others else ""
        return say(f"ECC is off{beside}", action=TURN_ON, device=device, ecc=False)
    if wanted is not False and gpu.text(PENDING) == "Disabled":
        say = fail if wanted else warn
        return say(
            "ECC will be off after the next reset", action="keep it on: nvidia-smi -e 1", device=device, ecc=True
        )
    gpu.yes(PENDING)
    return None


def _judge_errors(gpu: nvidia.Gpu, device: str, counts: dict[str, int]) -> Finding | None:
    """Finding about counted errors and the flags of the driver. None: there are none."""
    for flag, (meaning, action) in FLAGS.items():
        if gpu.text(flag) == "Yes":
            return fail(meaning, action=action, device=device)
    now = {name: count for name, count in counts.items() if name.startswith("volatile") and count}
    hard = {name: count for name, count in now.items() if _is_hard(name)}
    if hard:
        reason = f"uncorrectable errors since the last reset: {_say(hard)}"
        return fail(reason, action="drain the node and reset the GPU; replace it if they return", device=device, **hard)
    old = {name: count for name, count in counts.items() if name.startswith("aggregate") and count and _is_hard(name)}
    if old:
        reason = f"uncorrectable errors in its lifetime: {_say(old)}"
        return warn(reason, action="run --level 3 on it before a long job", device=device, **old)
    many = {name: count for name, count in now.items() if count >= CORRECTED_WARN}
    if many:
        reason = f"many corrected errors since the last reset: {_say(many)}"
        return warn(reason, action="run --level 3 on it before a long job", device=device, **many)
    return None


def _counts(gpu: nvidia.Gpu) -> tuple[dict[str, int], list[str]]:
    """Every counter by name (`volatile dram_uncorrectable`), and those without a number.

    A GPU that retires pages has N/A for some memories; with MIG the counters stand under the MIG devices.
    """
    counts: dict[str, int] = {}
    unread = []
    for path in filter(_is_counter, gpu.leaves):
        name = path.removeprefix("ecc_errors/").replace("/", " ")
        try:
            counts[name] = int(gpu.number("", path))
        except nvidia.NotReported as error:
            if error.applies or not _may_be_absent(gpu, path):
                unread.append(name.replace("_", " "))
    unread += [
        flag.rpartition("/")[2].replace("_", " ")
        for flag in FLAGS
        if gpu.text(flag) and gpu.text(flag) not in ("Yes", "No") and not _may_be_absent(gpu, flag)
    ]
    for number, mig_device in enumerate(gpu.mig_devices):
        text = mig_device.get(MIG_COUNT, "")
        if text.isascii() and text.isdigit():
            counts[f"volatile mig{number} sram_uncorrectable"] = int(text)
        elif text:
            unread.append(f"sram uncorrectable of MIG device {number}")
    return counts, unread


def _only_of_peers(gpu: nvidia.Gpu, gpus: nvidia.Gpus) -> list[str]:
    """Flags and counters that an equal GPU reports and that are absent here. With MIG they stand elsewhere."""
    peers = nvidia.same_model(gpus, gpu)
    paths = dict.fromkeys(path for peer in peers for path in peer.leaves if path in FLAGS or _is_counter(path))
    absent = [path for path in paths if not gpu.text(path) and nvidia.peers_report(gpus, gpu, path)]
    if absent and nvidia.mig_on(gpu):
        return []
    return [path.removeprefix("ecc_errors/").replace("/", " ").replace("_", " ") for path in absent]


def _without_partner(gpu: nvidia.Gpu) -> list[str]:
    """Counters and flags that are absent although the driver reports the value that always comes with them.

    Each volatile counter has an aggregate one. The threshold flag comes with the sources of SRAM errors
    (nvmlEccSramErrorStatus_v1_t), the pending repairs come together (nvmlRepairStatus_v1_t).
    """
    wanted = [flag for pair in PARTNERS for flag in pair if any(part in path for part in pair for path in gpu.leaves)]
    for path in gpu.leaves:
        if _is_counter(path) and path.startswith(_HALVES):
            _, half, name = path.split("/", 2)
            wanted.append(f"ecc_errors/{'aggregate' if half == 'volatile' else 'volatile'}/{name}")
    leaves = set(gpu.leaves)
    absent = [
        path
        for path in dict.fromkeys(wanted)
        if path not in leaves and not any(leaf.startswith(path) for leaf in leaves)
    ]
    if absent and nvidia.mig_on(gpu):
        return []
    return [path.removeprefix("ecc_errors/").replace("/", " ").replace("_", " ") for path in absent]


def _is_counter(path: str) -> bool:
    if path.startswith(f"{SOURCES}/"):
        return True
    return path.startswith(("ecc_errors/volatile", "ecc_errors/aggregate/")) and (
        "correctable" in path or "_bit/" in path
    )


def _may_be_absent(gpu: nvidia.Gpu, path: str) -> bool:
    """Whether N/A is normal here: while ECC is off or in MIG mode, for page-retiring GPUs and desktop boards."""
    if gpu.text(CURRENT) != "Enabled" or nvidia.mig_on(gpu) or nvidia.is_desktop(gpu):
        return True
    model = profiles.of_gpu(gpu.name)
    if model is None:
        return not path.endswith(("dram_uncorrectable", "total"))
    # GDDR counts no SRAM apart in some drivers; page-retiring GPUs report the memories they have.
    return model.generation in nvidia.RETIRES_PAGES or (model.memory_kind or "").startswith("GDDR")


def _is_hard(name: str) -> bool:
    return "uncorrectable" in name or "double_bit" in name


def _say(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())

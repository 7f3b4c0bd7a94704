"""Every NVLink of every GPU is up and clean. One that is down takes its share of all traffic between the GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainmaster.checks import nvidia, profiles
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Up to Hopper a link counts replays, recoveries and CRC errors. From Blackwell on the counters have other names, and
# FEC corrects most errors unseen ("FEC Errors - 0" grows on every healthy link). Tx and Rx packets are traffic.
_HARD = re.compile(r"recovery errors|recovery failed|malformed|buffer overrun|local link integrity|rx general", re.I)
_SOFT = re.compile(r"rx errors|rx remote errors|effective errors|symbol errors|discards|recovery successful", re.I)
_MANY = re.compile(r"replay errors|crc errors", re.I)
MANY_WARN = 1000  # ours: single repeats happen when a link trains; a bad cable makes thousands


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of one GPU."""

    up: frozenset[int] = frozenset()
    down: frozenset[int] = frozenset()
    errors: Mapping[str, int] = field(default_factory=dict)  # "link 3: Replay Errors" → how many
    strange: tuple[str, ...] = ()  # lines that nobody understands


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Links by the UUID of their GPU; `trouble` says why they are not known."""

    gpus: nvidia.Gpus
    links: Mapping[str, Links]
    trouble: str | None


def read(host: Host) -> Evidence:
    gpus = nvidia.read(host)
    texts = []
    for option in ("-s", "-e"):
        try:
            ran = host.run("nvidia-smi", "nvlink", option, timeout_s=nvidia.SMI_TIMEOUT_S)
        except HostError as wrong:
            return Evidence(gpus=gpus, links={}, trouble=str(wrong))
        if ran.exit_code:
            said = " ".join((ran.stdout + " " + ran.stderr).split())[:200]
            return Evidence(
                gpus=gpus, links={}, trouble=f"nvidia-smi nvlink {option} ended with {ran.exit_code}: {said}"
            )
        texts.append(ran.stdout)
    return Evidence(gpus=gpus, links=parse("\n".join(texts)), trouble=None)


def judge(evidence: Evidence, expect: Expect) -> list[Finding]:
    alone = nvidia.expected(evidence.gpus, expect) == 1
    return nvidia.judge_each(
        evidence.gpus, expect, lambda gpu, device: _judge_one(gpu, device, evidence, expect.nvlinks, alone)
    )


def _judge_one(gpu: nvidia.Gpu, device: str, evidence: Evidence, stated: int | None, alone: bool) -> Finding:
    model = profiles.of_gpu(gpu.name)
    wanted = stated if stated is not None else model.nvlinks if model and not alone else None
    if stated == 0:
        return skip("the profile expects no NVLink", device=device)
    if alone and stated is None:
        return skip("one GPU alone: NVLink connects it to nothing here", device=device)
    links = evidence.links.get(gpu.uuid or "")
    if evidence.trouble is not None or links is None:
        if wanted is None:
            return skip("nothing tells of NVLink and this model needs none", device=device)
        why = evidence.trouble or "nvidia-smi nvlink does not list this GPU"
        return error(f"its {wanted} NVLinks are not known: {why}", action="update the NVIDIA driver", device=device)
    values = {"up": len(links.up), "down": sorted(links.down), "expected": wanted, "errors": dict(links.errors)}
    if wanted is None and not links.up:
        return skip("no NVLink is connected and none is expected", device=device)
    if wanted is not None and len(links.up) < wanted:
        named = f" (link {', '.join(map(str, sorted(links.down)))})" if links.down else ""
        action = "drain the node; restart the fabric manager and reset the GPUs; replace the board if it stays"
        return fail(f"{len(links.up)} of {wanted} NVLinks are up{named}", action=action, device=device, **values)
    if links.strange:
        reason = f"nvidia-smi nvlink says what is not understood: {links.strange[0][:60]}"
        return error(reason, action="report it, with the folder that --capture writes", device=device, **values)
    hard = {name: count for name, count in links.errors.items() if _HARD.search(name)}
    soft = {name: count for name, count in links.errors.items() if name not in hard}
    if hard:
        action = "drain the node and reset the GPUs; replace the board if the errors return"
        return fail(f"NVLink errors: {_say(hard)}", action=action, device=device, **values)
    if wanted is None and links.down:
        action = "seat the NVLink bridge"
        return warn(f"{len(links.down)} of its NVLinks are down", action=action, device=device, **values)
    if soft:
        action = "test the bandwidth between the GPUs (--level 2)"
        return warn(f"NVLink errors: {_say(soft)}", action=action, device=device, **values)
    return ok(f"{len(links.up)} NVLinks are up", device=device, **values)


_GPU = re.compile(r"GPU \d{1,4}: .{1,100} \(UUID: (?P<uuid>[\w-]{4,60})\)", re.ASCII)
_STATE = re.compile(r"Link (?P<link>\d{1,3}): (?:(?P<up>[\d.]{1,12} GB/s)|<?(?P<down>inactive)>?)", re.I | re.ASCII)
_COUNT = re.compile(r"Link (?P<link>\d{1,3}): (?P<name>[A-Za-z][\w ./()-]{1,60}): (?P<count>\d{1,18})", re.ASCII)
_OTHER = re.compile(r"Link \d{1,3}: [A-Za-z][\w ./()-]{1,60}: (?:N/A|[\d.]+e[-+]?\d+|.{0,40}FEC.{0,40})", re.ASCII)
_NONE = re.compile(r"NVML: Unable to retrieve NVLink information as all links are inActive", re.I)


def parse(text: str) -> dict[str, Links]:
    """`nvidia-smi nvlink -s` and `-e`, one after the other. A line that is not understood is kept as such."""
    found: dict[str, Links] = {}
    uuid = None
    for line in (raw.strip() for raw in text.splitlines()):
        head = _GPU.fullmatch(line)
        if head is not None:
            uuid = head["uuid"]
            found.setdefault(uuid, Links())
        elif line and uuid is not None:
            found[uuid] = _add(found[uuid], line)
    return found


def _add(links: Links, line: str) -> Links:
    up, down, errors, strange = set(links.up), set(links.down), dict(links.errors), list(links.strange)
    state, count = _STATE.fullmatch(line), _COUNT.fullmatch(line)
    if state is not None:
        (up if state["up"] else down).add(int(state["link"]))
    elif count is not None:
        number = int(count["count"])
        bad = _HARD.search(count["name"]) or _SOFT.search(count["name"])
        if (number and bad) or (number >= MANY_WARN and _MANY.search(count["name"])):
            errors[f"link {count['link']}: {count['name']}"] = number
    elif _OTHER.fullmatch(line) is None and _NONE.fullmatch(line) is None:
        strange.append(line)
    # A link that is said to be both is not up.
    return Links(up=frozenset(up - down), down=frozenset(down), errors=errors, strange=tuple(strange[:5]))


def _say(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:3])
    return shown + (f" and {len(counts) - 3} more" if len(counts) > 3 else "")

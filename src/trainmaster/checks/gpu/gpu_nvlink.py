"""Every NVLink of every GPU is up, at full speed and without errors. A lost link takes its share of the traffic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.comparison import hardware
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.gpus import UNVERIFIED
from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = True
EXPECTS = ("nvlinks",)
COMPARES = (hardware("up", "NVLinks up", "see gpu_nvlink on this node"),)
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
# Up to Hopper a link counts replays, recoveries and CRC errors. From Blackwell on the counters have other names, and
# FEC corrects most errors unseen ("FEC Errors - 0" grows on every healthy link). Tx and Rx packets are traffic.
_HARD = re.compile(r"recovery errors|recovery failed|malformed|buffer overrun|local link integrity|rx general", re.I)
_SOFT = re.compile(r"rx errors|rx remote errors|effective errors|symbol errors|discards|recovery successful", re.I)
_MANY = re.compile(r"replay errors|crc errors", re.I)
# Names that drivers before Blackwell print together: one of them shows which others must be there.
_BEFORE_BLACKWELL = frozenset({"Replay Errors", "Recovery Errors", "CRC Errors"})
MANY_WARN = 1000  # ours: single repeats happen when a link trains; a bad cable makes thousands
SLOW = 0.9  # ours: all links of one GPU model have one rate, so any that trained at a lower one is far below
_TROUBLE = re.compile(r"error|unable|fail|lost", re.I)  # on standard error, while the exit code is 0
# Product names of modules that are sold with NVLink only.
_NAMED = re.compile(r"SXM|\bGB\d{3}\b|\bHGX\b", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of one GPU."""

    up: frozenset[int] = frozenset()
    down: frozenset[int] = frozenset()  # inactive, or at 0 GB/s
    rates_gbps: Mapping[int, float] = field(default_factory=dict)
    counters: Mapping[int, frozenset[str]] = field(default_factory=dict)  # names of the error counters of each link
    errors: Mapping[str, int] = field(default_factory=dict)  # "link 3: Replay Errors" → count
    strange: tuple[str, ...] = ()  # lines of no known form
    inactive: bool = False  # the driver reports that all links are inactive


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Links by the UUID of their GPU; `trouble` is the reason why an answer is missing."""

    gpus: nvidia.Gpus
    links: Mapping[str, Links]
    trouble: str | None


def read(host: Host) -> Evidence:
    gpus = nvidia.read(host)
    texts, troubles = [], []
    for option in ("-s", "-e"):
        try:
            result = host.run("nvidia-smi", "nvlink", option, timeout_s=nvidia.SMI_TIMEOUT_S)
        except HostError as error:
            troubles.append(str(error))
            continue
        if result.exit_code:
            output = " ".join((result.stdout + " " + result.stderr).split())[:200]
            troubles.append(f"nvidia-smi nvlink {option} ended with {result.exit_code}: {output}")
        elif printed := [line for line in map(str.strip, result.stderr.splitlines()) if _is_trouble(line)]:
            troubles.append(f"nvidia-smi nvlink {option} printed: {printed[0][:200]}")
        texts.append(result.stdout)
    # What one of the two answered counts, whatever became of the other.
    return Evidence(gpus=gpus, links=parse("\n".join(texts)), trouble="; ".join(troubles) or None)


def _is_trouble(line: str) -> bool:
    return _TROUBLE.search(line) is not None and _NONE.fullmatch(line) is None


def judge(evidence: Evidence, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(evidence.gpus, expect, lambda gpu, device: _judge_one(gpu, device, evidence, expect))


def _judge_one(gpu: nvidia.Gpu, device: str, evidence: Evidence, expect: Expect) -> Finding:
    links = evidence.links.get(gpu.uuid or "")
    wanted, source = _wanted(gpu, evidence, expect)
    known = links or Links()
    values = {"up": len(known.up), "down": sorted(known.down), "expected": wanted, "errors": dict(known.errors)}
    hard = {name: count for name, count in known.errors.items() if _HARD.search(name)}
    if hard:
        action = "drain the node and reset the GPUs; replace the board if the errors return"
        return fail(f"NVLink errors: {_say(hard)}", action=action, device=device, **values)
    if wanted and links is not None and _shows_state(links) and len(links.up) < wanted and not _in_mig(gpu, expect):
        named = f" (link {', '.join(map(str, sorted(links.down)))})" if links.down else ""
        action = "drain the node; restart the fabric manager and reset the GPUs; replace the board if it stays"
        dark = not links.up and _on_fabric(gpu, evidence)  # a fabric without a link joins nothing
        say = fail if source != UNVERIFIED or dark else warn
        return say(f"{len(links.up)} of {wanted} NVLinks are up{named}", action=action, device=device, **values)
    proof = _proof_of_none(gpu, device, evidence, expect, links)
    if proof is not None:
        return skip("no NVLink to judge here", proof=proof, device=device)
    if links is None or not _shows_state(links) or evidence.trouble is not None:
        why = evidence.trouble or "nvidia-smi nvlink does not list its links"
        of = f"its {wanted} NVLinks are" if wanted else "its NVLinks are"
        return error(f"{of} not known: {why}", action="update the NVIDIA driver", device=device, **values)
    finding = _judge_links(links, device, gpu, evidence, values)
    if finding.verdict is Verdict.PASS and links.down and expect.nvlinks is None and not _may_be_inactive(gpu, links):
        action = "compare with another machine of this model; state nvlinks=N if so many are meant to be up"
        reason = f"{len(links.down)} of {len(links.down) + len(links.up)} NVLinks are inactive on this model"
        return warn(reason, action=action, device=device, **values)
    return finding


def _judge_links(links: Links, device: str, gpu: nvidia.Gpu, evidence: Evidence, values: Mapping[str, Any]) -> Finding:
    """Finding about links of which enough are up."""
    if links.strange:
        reason = f"nvidia-smi nvlink prints a line of no known form: {links.strange[0][:60]}"
        return error(reason, action="report it, with the folder that --capture writes", device=device, **values)
    if links.down and (not links.up or values["expected"] is None):
        if _on_fabric(gpu, evidence):
            action = "drain the node; restart the fabric manager and reset the GPUs"
            return fail(f"{len(links.down)} of its NVLinks are down", action=action, device=device, **values)
        action = "seat the NVLink bridge, or state nvlinks=0 if there is none"
        return warn(f"{len(links.down)} of its NVLinks are down", action=action, device=device, **values)
    fastest, whose = _fastest(gpu, evidence)
    slow = {link: rate for link, rate in sorted(links.rates_gbps.items()) if link in links.up and rate < SLOW * fastest}
    if slow:
        named = ", ".join(f"link {link} at {rate:g} GB/s" for link, rate in list(slow.items())[:3])
        action = "drain the node and reset the GPUs; replace the board if the link stays slow"
        reason = f"{len(slow)} NVLinks are slow: {named}, where {whose} {fastest:g}"
        return fail(reason, action=action, device=device, **values)
    if missing := _uncounted(links, gpu, evidence):
        reason = f"nvidia-smi nvlink -e reports no error counters of {missing}"
        return error(reason, action="update the NVIDIA driver; reset the GPU if it stays", device=device, **values)
    if links.errors:
        action = "test the bandwidth between the GPUs (--level 2)"
        return warn(f"NVLink errors: {_say(links.errors)}", action=action, device=device, **values)
    return ok(f"{len(links.up)} NVLinks are up", device=device, **values)


def _uncounted(links: Links, gpu: nvidia.Gpu, evidence: Evidence) -> str | None:
    """First link without an error counter that it must have, by the other links of equal GPUs and by the driver."""
    equal = [evidence.links.get(str(other.uuid)) for other in nvidia.same_model(evidence.gpus, gpu)]
    every = [names for other in (links, *equal) if other is not None for names in other.counters.values()]
    wanted = frozenset().union(*every)
    wanted |= _BEFORE_BLACKWELL if wanted & _BEFORE_BLACKWELL else frozenset()
    for link in sorted(links.up):
        has = links.counters.get(link, frozenset())
        if not has or wanted - has:
            return f"link {link}" + (f" ({', '.join(sorted(wanted - has)[:3])})" if has else "")
    if not any(map(_HARD.search, wanted)):
        return f"link {min(links.up)} that show a fault" if links.up else None
    return None


def _fastest(gpu: nvidia.Gpu, evidence: Evidence) -> tuple[float, str]:
    """Highest rate of a link of this GPU and of the equal ones, or that of its model."""
    equal = [evidence.links.get(str(other.uuid)) for other in (gpu, *nvidia.same_model(evidence.gpus, gpu))]
    seen = max((rate for links in equal if links is not None for rate in links.rates_gbps.values()), default=0.0)
    model = profiles.of_gpu(gpu.name)
    known = model.nvlink_gbps if model is not None and model.is_verified("nvlink_gbps") else None
    return (known, "its model has") if known is not None and known > seen else (seen, "others have")


def _may_be_inactive(gpu: nvidia.Gpu, links: Links) -> bool:
    """Whether inactive links are normal: bridges are optional, or as many are up as the model has."""
    model = profiles.of_gpu(gpu.name)
    return model is not None and (model.nvlinks is None or len(links.up) >= model.nvlinks)


def _wanted(gpu: nvidia.Gpu, evidence: Evidence, expect: Expect) -> tuple[int | None, str]:
    """Number of links that must be up, and its source: stated, the model's, or that of the GPU's peers."""
    if expect.nvlinks is not None:
        return expect.nvlinks, "stated"
    if nvidia.expected(evidence.gpus, expect) == 1:
        return None, ""
    peers = [
        evidence.links[str(p.uuid)] for p in nvidia.same_model(evidence.gpus, gpu) if str(p.uuid) in evidence.links
    ]
    most = max((len(links.up) for links in peers), default=0)
    model = profiles.of_gpu(gpu.name)
    if model is not None and model.nvlinks is not None:
        if model.is_verified("nvlinks") or most <= model.nvlinks:
            least = model.nvlinks if model.is_verified("nvlinks") else most
            return (least, "model") if least or not model.nvlinks else (model.nvlinks, UNVERIFIED)
        return most, "peers"
    if most:
        return most, "peers"
    if _on_fabric(gpu, evidence) or (model is None and _NAMED.search(gpu.name or "")):
        return 1, "fabric"
    return None, ""


def _in_mig(gpu: nvidia.Gpu, expect: Expect) -> bool:
    """Whether MIG takes the links away: NVLink joins whole GPUs only."""
    return expect.nvlinks is None and nvidia.mig_on(gpu)


def _on_fabric(gpu: nvidia.Gpu, evidence: Evidence) -> bool:
    """Whether the GPU is behind NVSwitches, by the driver's word or by the bus."""
    return gpu.reports("fabric/state") or bool(evidence.gpus.switches)


def _shows_state(links: Links) -> bool:
    return bool(links.up or links.down or links.inactive)


def _proof_of_none(gpu: nvidia.Gpu, device: str, evidence: Evidence, expect: Expect, links: Links | None) -> str | None:
    """What shows that there is no link to judge; None: there may be one."""
    model = profiles.of_gpu(gpu.name)
    if expect.nvlinks is not None:
        return "nvlinks=0 is stated" if expect.nvlinks == 0 else None
    if nvidia.expected(evidence.gpus, expect) == 1:
        return "one GPU is here: NVLink joins it to no other"
    if links is not None and links.up:
        return None
    if nvidia.mig_on(gpu):
        return f"MIG is Enabled on {device}: NVLink joins whole GPUs only"
    if model is not None and model.nvlinks == 0:
        return f"a {model.name} has no NVLink ({model.sources['nvlinks']})"
    if links is None or evidence.trouble is not None or links.strange or _on_fabric(gpu, evidence):
        return None
    if model is not None and model.nvlinks is None:
        return f"bridges are optional on a {model.name}, and nvidia-smi nvlink shows none connected"
    if model is None and not links.down and not links.inactive and not _NAMED.search(gpu.name or ""):
        others = [evidence.links.get(str(peer.uuid)) for peer in nvidia.same_model(evidence.gpus, gpu)]
        if not any(other is None or _shows_state(other) for other in others):
            return "nvidia-smi nvlink lists the GPU without any link"
    return None


_GPU = re.compile(r"GPU \d{1,4}: .{1,100} \(UUID: (?P<uuid>[\w-]{4,60})\)", re.ASCII)
_STATE = re.compile(
    r"Link (?P<link>\d{1,3}): (?:(?P<up>\d{1,6}(?:\.\d{1,6})?) GB/s|<?(?P<down>inactive)>?)", re.I | re.ASCII
)
_COUNT = re.compile(r"Link (?P<link>\d{1,3}): (?P<name>[A-Za-z][\w ./()-]{1,60}): (?P<count>\d{1,18})", re.ASCII)
# No count: a rate, bins of FEC, or a counter that is not given and so counts as absent.
_OTHER = re.compile(r"Link \d{1,3}: [A-Za-z][\w ./()-]{1,60}: (?:N/A|[\d.]+e[-+]?\d+|.{0,40}FEC.{0,40})", re.ASCII)
_NONE = re.compile(r"NVML: Unable to retrieve NVLink information as all links are inActive", re.I)


def parse(text: str) -> dict[str, Links]:
    """Links from `nvidia-smi nvlink -s` and `-e`, one after the other. A line of no known form is kept as such."""
    links: dict[str, Links] = {}
    uuid = None
    for line in (raw.strip() for raw in text.splitlines()):
        head = _GPU.fullmatch(line)
        if head is not None:
            uuid = head["uuid"]
            links.setdefault(uuid, Links())
        elif line and uuid is not None:
            links[uuid] = _add(links[uuid], line)
    return links


def _add(links: Links, line: str) -> Links:
    up, down, errors, strange = set(links.up), set(links.down), dict(links.errors), list(links.strange)
    rates = dict(links.rates_gbps)
    counters, inactive = dict(links.counters), links.inactive or _NONE.fullmatch(line) is not None
    state, count = _STATE.fullmatch(line), _COUNT.fullmatch(line)
    if state is not None:
        link, rate = int(state["link"]), float(state["up"] or 0)
        (up if rate else down).add(link)
        rates[link] = min(rate, rates.get(link, rate))
    elif count is not None:
        number = int(count["count"])
        bad = _HARD.search(count["name"]) or _SOFT.search(count["name"])
        if bad or _MANY.search(count["name"]):
            counters[int(count["link"])] = counters.get(int(count["link"]), frozenset()) | {count["name"]}
        if (number and bad) or (number >= MANY_WARN and _MANY.search(count["name"])):
            errors[f"link {count['link']}: {count['name']}"] = number
    elif _OTHER.fullmatch(line) is None and _NONE.fullmatch(line) is None:
        strange.append(line)
    return Links(
        up=frozenset(up - down),  # a link that is reported as both is not up
        down=frozenset(down),
        rates_gbps=rates,
        counters=counters,
        errors=errors,
        strange=tuple(strange[:5]),
        inactive=inactive,
    )


def _say(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in list(counts.items())[:3])
    return shown + (f" and {len(counts) - 3} more" if len(counts) > 3 else "")

"""Every pair of GPUs in the node exchanges data at its links' rate, unchanged. One weak link slows every collective.

All disjoint pairs of a round copy at once, as collectives do. A pair is judged by its links where an NVSwitch joins
them, and by the other pairs of equal GPUs; each GPU by its peers: the median over its partners is alike for all GPUs of
a symmetric board. Where boards differ by design (two sockets, bridges, cube mesh), every GPU has slow ways.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import nvidia, profiles
from trainmaster.checks.active import _probe, _rates
from trainmaster.checks.active._rates import Judged, Yardstick
from trainmaster.checks.comparison import rate
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, skip
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ("p2p_gbps",)
COMPARES = (rate("gbps", "GB/s"),)
METRICS: dict[str, str] = {}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S
NVLINK_GBPS = 25.0  # one link, one way: NVLink 2, 3 and 4; NVLink 5 has twice that
LINKS_WARN, LINKS_FAIL = 0.75, 0.60  # of all of a GPU's links together: H200 reach 88 % (396 of 450)
PAIR_FAIL = 0.6  # of the median of all ways between equal GPUs
LEAST_GPUS = 3  # of two GPUs, both ways are one pair
SLOW = "see the NVLink state and error counters of both, and the fabric manager's log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Answer of the one probe of all GPUs; None with fewer than two GPUs."""

    probed: _probe.Probed
    uuids: tuple[str, ...]  # in the order the probe numbers them
    answer: _probe.Answer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction of one pair."""

    sender: str
    receiver: str
    gbps: float
    direct: bool
    wrong: int


def read(host: Host) -> Exchanged:
    gpus = nvidia.read(host)
    every = [str(gpu.uuid) for gpu in gpus.smi.gpus if gpu.lost is None] if gpus.smi else []
    visible = host.env("CUDA_VISIBLE_DEVICES") if every else None
    hidden = _probe.hidden_from(every, visible)
    uuids = tuple(uuid for uuid in every if uuid not in hidden)
    answer: _probe.Answer | None = None
    if len(uuids) > 1:
        try:
            answer = host.run(*_probe.command("p2p", ",".join(uuids)), timeout_s=_probe.TIMEOUT_S)
        except HostError as wrong:
            answer = wrong
    probed = _probe.Probed(gpus=gpus, visible=visible, hidden=hidden, answers={})
    return Exchanged(probed=probed, uuids=uuids, answer=answer)


def judge(exchanged: Exchanged, expect: Expect) -> list[Finding]:
    gpus = exchanged.probed.gpus
    refused = nvidia.refuse(gpus, expect)
    if refused is not None:
        return [refused]
    slots = nvidia.slots(gpus, nvidia.expected(gpus, expect))
    if len(slots) == 1:
        return [skip("one GPU: there is no peer to copy to", proof="one GPU is expected and listed")]
    device_of = {str(slot.gpu.uuid): slot.device for slot in slots if slot.gpu and slot.gpu.lost is None}
    found = [nvidia.missing_gpu(slot) for slot in slots if slot.gpu is None or slot.gpu.lost is not None]
    found += [_probe.hidden_gpu(exchanged.probed, device_of[uuid], expect) for uuid in exchanged.probed.hidden]
    asked = [device_of[uuid] for uuid in exchanged.uuids]
    if len(asked) == 1:
        proof = f"CUDA_VISIBLE_DEVICES={exchanged.probed.visible}"
        found.append(skip("one GPU is visible: there is no peer to copy to", proof=proof, device=asked[0]))
    elif asked:
        found += _judge_pairs(exchanged, asked, expect)
    return _probe.in_order(found)


def _judge_pairs(exchanged: Exchanged, asked: list[str], expect: Expect) -> list[Finding]:
    judged = _probe.judge_answer(exchanged.answer, "p2p", asked[0], None)
    why = judged.reason if isinstance(judged, Finding) else "the probe left it out"
    try:
        document = _probe.results_of(exchanged.answer, "p2p")
        ways = _ways(document, exchanged.uuids, asked)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as wrong:
        ways, why = [], why if isinstance(judged, Finding) else f"the report cannot be understood: {wrong}"
    middle = {}
    for device in asked:
        mine = [way for way in ways if device in (way.sender, way.receiver)]
        if len(mine) == 2 * (len(asked) - 1):
            middle[device] = statistics.median(way.gbps for way in mine)
    models = dict(zip(asked, _models(exchanged), strict=True))
    switched = bool(exchanged.probed.gpus.switches)
    odd = [
        one
        for model in dict.fromkeys(models.values())
        for one in _odd_ways(
            [way for way in ways if models[way.sender] == models[way.receiver] == model],
            middle,
            symmetric=_symmetric(model, exchanged.probed.gpus),
        )
    ]
    found = []
    for device in asked:
        mine = [way for way in ways if device in (way.sender, way.receiver)]
        if device in middle:
            peers = [middle[other] for other in middle if models[other] == models[device]]
            found.append(_judge_one(device, mine, peers, _yardstick(models[device], switched), expect, odd=odd))
        elif isinstance(judged, Finding) and judged.verdict is Verdict.FAIL and _at_work(device, asked, judged):
            found.append(
                Finding(verdict=Verdict.FAIL, reason=why, action=judged.action, device=device, values=judged.values)
            )
        else:
            action = judged.action if isinstance(judged, Finding) and judged.action else "run the p2p probe by hand"
            reason = f"{len(mine)} of {2 * (len(asked) - 1)} ways were measured: {why}"
            found.append(error(reason, action=action, device=device, measured=_row(device, mine)))
    return found


def _judge_one(
    device: str,
    mine: list[Way],
    peers: list[float],
    known: Yardstick | None,
    expect: Expect,
    *,
    odd: Sequence[tuple[Way, str]] = (),
) -> Finding:
    middle = statistics.median(way.gbps for way in mine)
    lowest = min(mine, key=lambda way: way.gbps)
    found = [
        _rates.judge(
            [middle],
            "GB/s to and from its peers",
            stated=expect.p2p_gbps,
            state_as="p2p_gbps",
            known=known,
            peers=peers,
            slow=SLOW,
        )
    ]
    floor = expect.p2p_gbps if expect.p2p_gbps is not None else known.rate * known.fail_below if known else None
    if floor is not None and lowest.gbps < floor:
        words = f"{lowest.gbps:,.4g} GB/s from {lowest.sender} to {lowest.receiver}, at least {floor:,.4g} are expected"
        found.append(Judged(verdict=Verdict.FAIL, words=words, action=SLOW))
    found += [Judged(verdict=Verdict.FAIL, words=words, action=SLOW) for way, words in odd if way in mine]
    for way in mine:
        if way.wrong:
            words = f"{way.wrong:,} words changed on their way from {way.sender} to {way.receiver}"
            action = "turn off PCIe ACS and IOMMU between the GPUs, or mend the link; do not train on it before"
            found.append(Judged(verdict=Verdict.FAIL, words=words, action=action))
        if known is not None and not way.direct:
            words = f"no direct way from {way.sender} to {way.receiver}"
            found.append(
                Judged(verdict=Verdict.FAIL, words=words, action="see the fabric manager and the NVLink state")
            )
    return _rates.combine(device, found, p2p_gbps=round(middle, 1), p2p_lowest_gbps=lowest.gbps, row=_row(device, mine))


def _odd_ways(ways: list[Way], middle: Mapping[str, float], *, symmetric: bool) -> list[tuple[Way, str]]:
    """Ways that are slow, or not direct, where the others between equal GPUs are not, each with its sentence.

    A way to a GPU that is slow to all is that GPU's fault, and judged there. On a board that is not known as
    symmetric, ways differ by design if each GPU has such ones.
    """
    gpus = {way.sender for way in ways}
    if len(gpus) < LEAST_GPUS:
        return []
    usual = statistics.median(way.gbps for way in ways)
    direct = 2 * sum(way.direct for way in ways) > len(ways)
    found = []
    for way in ways:
        if any(middle.get(end, usual) < PAIR_FAIL * usual for end in (way.sender, way.receiver)):
            continue
        if way.gbps < PAIR_FAIL * usual:
            share = f"{way.gbps / usual:.0%} of the median of all ways here"
            found.append((way, f"{way.gbps:,.4g} GB/s from {way.sender} to {way.receiver}, {share}"))
        elif direct and not way.direct:
            found.append((way, f"no direct way from {way.sender} to {way.receiver}, where most are direct"))
    if not symmetric and {end for way, _ in found for end in (way.sender, way.receiver)} == gpus:
        return []
    return found


def _symmetric(model: str | None, gpus: nvidia.Gpus) -> bool:
    """Whether all pairs are alike by design: behind NVSwitches, or on an SXM board from Ampere on."""
    listed = gpus.smi.gpus if gpus.smi else ()
    if gpus.switches or any(gpu.tells("fabric/state") for gpu in listed if gpu.name == model):
        return True
    known = profiles.of_gpu(model)
    return known is not None and bool(known.nvlinks) and known.generation not in nvidia.RETIRES_PAGES


def _ways(results: Mapping[str, Any], uuids: tuple[str, ...], asked: list[str]) -> list[Way]:
    told = [gpu.get("uuid") for gpu in results["gpus"]]
    types = {gpu.get("type") for gpu in results["gpus"]}
    if (
        types != {"cuda"}
        or len(told) != len(uuids)
        or any(a not in (b, None) for a, b in zip(told, uuids, strict=True))
    ):
        raise ValueError("it reports other GPUs than requested")
    found = {}
    for pair in results["pairs"]:
        sender, receiver = asked[_probe.count(pair, "from")], asked[_probe.count(pair, "to")]
        rate = _probe.number(pair, "gbps")
        if rate <= 0 or sender == receiver:
            raise ValueError(f"{rate:g} GB/s from {sender} to {receiver}")
        found[sender, receiver] = Way(
            sender=sender,
            receiver=receiver,
            gbps=rate,
            direct=pair.get("direct") is True,
            wrong=_probe.count(pair, "wrong"),
        )
    return list(found.values())


def _row(device: str, mine: list[Way]) -> dict[str, float]:
    return {f"{way.sender}->{way.receiver}": way.gbps for way in mine if way.sender == device}


def _models(exchanged: Exchanged) -> list[str | None]:
    smi = exchanged.probed.gpus.smi
    names = {str(gpu.uuid): gpu.name for gpu in smi.gpus} if smi else {}
    return [names.get(uuid) for uuid in exchanged.uuids]


def _yardstick(model: str | None, switched: bool) -> Yardstick | None:
    """Through an NVSwitch any pair has all links of both. Without one, boards differ: only peers are compared."""
    known = profiles.of_gpu(model)
    if known is None or not known.nvlinks or not switched:
        return None
    rate = known.nvlinks * NVLINK_GBPS
    return Yardstick(rate=rate, words="of its NVLinks", warn_below=LINKS_WARN, fail_below=LINKS_FAIL)


def _at_work(device: str, asked: list[str], judged: Finding) -> bool:
    """Whether the step at which the probe hung names this GPU."""
    step = str(judged.values.get("step", ""))
    number = asked.index(device)
    return any(str(number) in pair.split("->") for pair in step.partition(": ")[2].split())

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
class PairTransfer:
    """One direction of one pair."""

    sender: str
    receiver: str
    gbps: float
    direct: bool
    wrong_words: int


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
        except HostError as error:
            answer = error
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
    findings = [nvidia.missing_gpu(slot) for slot in slots if slot.gpu is None or slot.gpu.lost is not None]
    findings += [_probe.hidden_gpu(exchanged.probed, device_of[uuid], expect) for uuid in exchanged.probed.hidden]
    devices = [device_of[uuid] for uuid in exchanged.uuids]
    if len(devices) == 1:
        proof = f"CUDA_VISIBLE_DEVICES={exchanged.probed.visible}"
        findings.append(skip("one GPU is visible: there is no peer to copy to", proof=proof, device=devices[0]))
    elif devices:
        findings += _judge_pairs(exchanged, devices, expect)
    return _probe.in_order(findings)


def _judge_pairs(exchanged: Exchanged, devices: list[str], expect: Expect) -> list[Finding]:
    judged = _probe.judge_answer(exchanged.answer, "p2p", devices[0], None)
    why = judged.reason if isinstance(judged, Finding) else "the probe left it out"
    try:
        document = _probe.results_of(exchanged.answer, "p2p")
        transfers = _transfers(document, exchanged.uuids, devices)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        transfers, why = [], why if isinstance(judged, Finding) else f"the report cannot be understood: {exc}"
    middle = {}
    for device in devices:
        mine = [transfer for transfer in transfers if device in (transfer.sender, transfer.receiver)]
        if len(mine) == 2 * (len(devices) - 1):
            middle[device] = statistics.median(transfer.gbps for transfer in mine)
    models = dict(zip(devices, _models(exchanged), strict=True))
    switched = bool(exchanged.probed.gpus.switches)
    odd = [
        odd_transfer
        for model in dict.fromkeys(models.values())
        for odd_transfer in _odd_transfers(
            [transfer for transfer in transfers if models[transfer.sender] == models[transfer.receiver] == model],
            middle,
            symmetric=_symmetric(model, exchanged.probed.gpus),
        )
    ]
    findings = []
    for device in devices:
        mine = [transfer for transfer in transfers if device in (transfer.sender, transfer.receiver)]
        if device in middle:
            peers = [middle[other] for other in middle if models[other] == models[device]]
            findings.append(_judge_one(device, mine, peers, _yardstick(models[device], switched), expect, odd=odd))
        elif isinstance(judged, Finding) and judged.verdict is Verdict.FAIL and _at_work(device, devices, judged):
            findings.append(
                Finding(verdict=Verdict.FAIL, reason=why, action=judged.action, device=device, values=judged.values)
            )
        else:
            action = judged.action if isinstance(judged, Finding) and judged.action else "run the p2p probe by hand"
            reason = f"{len(mine)} of {2 * (len(devices) - 1)} ways were measured: {why}"
            findings.append(error(reason, action=action, device=device, measured=_row(device, mine)))
    return findings


def _judge_one(
    device: str,
    mine: list[PairTransfer],
    peers: list[float],
    known: Yardstick | None,
    expect: Expect,
    *,
    odd: Sequence[tuple[PairTransfer, str]] = (),
) -> Finding:
    middle = statistics.median(transfer.gbps for transfer in mine)
    lowest = min(mine, key=lambda transfer: transfer.gbps)
    judgements = [
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
        judgements.append(Judged(verdict=Verdict.FAIL, words=words, action=SLOW))
    judgements += [
        Judged(verdict=Verdict.FAIL, words=words, action=SLOW) for transfer, words in odd if transfer in mine
    ]
    for transfer in mine:
        if transfer.wrong_words:
            words = f"{transfer.wrong_words:,} words changed on their way from {transfer.sender} to {transfer.receiver}"
            action = "turn off PCIe ACS and IOMMU between the GPUs, or mend the link; do not train on it before"
            judgements.append(Judged(verdict=Verdict.FAIL, words=words, action=action))
        if known is not None and not transfer.direct:
            words = f"no direct way from {transfer.sender} to {transfer.receiver}"
            judgements.append(
                Judged(verdict=Verdict.FAIL, words=words, action="see the fabric manager and the NVLink state")
            )
    return _rates.combine(
        device, judgements, p2p_gbps=round(middle, 1), p2p_lowest_gbps=lowest.gbps, row=_row(device, mine)
    )


def _odd_transfers(
    transfers: list[PairTransfer], middle: Mapping[str, float], *, symmetric: bool
) -> list[tuple[PairTransfer, str]]:
    """Ways that are slow, or not direct, where the others between equal GPUs are not, each with its sentence.

    A way to a GPU that is slow to all is that GPU's fault, and judged there. On a board that is not known as
    symmetric, ways differ by design if each GPU has such ones.
    """
    gpus = {transfer.sender for transfer in transfers}
    if len(gpus) < LEAST_GPUS:
        return []
    usual = statistics.median(transfer.gbps for transfer in transfers)
    direct = 2 * sum(transfer.direct for transfer in transfers) > len(transfers)
    odd = []
    for transfer in transfers:
        if any(middle.get(end, usual) < PAIR_FAIL * usual for end in (transfer.sender, transfer.receiver)):
            continue
        if transfer.gbps < PAIR_FAIL * usual:
            share = f"{transfer.gbps / usual:.0%} of the median of all ways here"
            odd.append((transfer, f"{transfer.gbps:,.4g} GB/s from {transfer.sender} to {transfer.receiver}, {share}"))
        elif direct and not transfer.direct:
            odd.append(
                (transfer, f"no direct way from {transfer.sender} to {transfer.receiver}, where most are direct")
            )
    if not symmetric and {end for transfer, _ in odd for end in (transfer.sender, transfer.receiver)} == gpus:
        return []
    return odd


def _symmetric(model: str | None, gpus: nvidia.Gpus) -> bool:
    """Whether all pairs are alike by design: behind NVSwitches, or on an SXM board from Ampere on."""
    listed = gpus.smi.gpus if gpus.smi else ()
    if gpus.switches or any(gpu.reports("fabric/state") for gpu in listed if gpu.name == model):
        return True
    known = profiles.of_gpu(model)
    return known is not None and bool(known.nvlinks) and known.generation not in nvidia.RETIRES_PAGES


def _transfers(results: Mapping[str, Any], uuids: tuple[str, ...], devices: list[str]) -> list[PairTransfer]:
    reported = [gpu.get("uuid") for gpu in results["gpus"]]
    types = {gpu.get("type") for gpu in results["gpus"]}
    if (
        types != {"cuda"}
        or len(reported) != len(uuids)
        or any(a not in (b, None) for a, b in zip(reported, uuids, strict=True))
    ):
        raise ValueError("it reports other GPUs than requested")
    transfers = {}
    for pair in results["pairs"]:
        sender, receiver = devices[_probe.count(pair, "from")], devices[_probe.count(pair, "to")]
        rate = _probe.number(pair, "gbps")
        if rate <= 0 or sender == receiver:
            raise ValueError(f"{rate:g} GB/s from {sender} to {receiver}")
        transfers[sender, receiver] = PairTransfer(
            sender=sender,
            receiver=receiver,
            gbps=rate,
            direct=pair.get("direct") is True,
            wrong_words=_probe.count(pair, "wrong"),
        )
    return list(transfers.values())


def _row(device: str, mine: list[PairTransfer]) -> dict[str, float]:
    return {f"{transfer.sender}->{transfer.receiver}": transfer.gbps for transfer in mine if transfer.sender == device}


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


def _at_work(device: str, devices: list[str], judged: Finding) -> bool:
    """Whether the step at which the probe hung names this GPU."""
    step = str(judged.values.get("step", ""))
    number = devices.index(device)
    return any(str(number) in pair.split("->") for pair in step.partition(": ")[2].split())

"""No port of the fabric counts errors or flaps. A marginal cable works in every test and stalls the job at night.

Counters run from driver start, so they are judged per day of uptime; if they were cleared since, the true rate is
higher than the judged one, never lower.

Each port is judged by itself, and what was counted before what cannot be read. `counters/` answers EINVAL where the
device has no port management: Broadcom's bnxt_re keeps its numbers in `hw_counters/` (drivers/infiniband/hw/bnxt_re/
hw_counters.c; https://github.com/prometheus/procfs/pull/675), the functions that manage NVSwitches have none (_roles).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.checks import system_files
from trainmaster.checks.fabric import _rdma_devices, _roles, _trouble
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect, implies_rdma
from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import ibstat

LEVEL = 1
GPU = False
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
DAY_S = 86_400
LEAST_DAYS = 0.25  # the few errors of a link that has just trained are no rate
# Bit errors that remain after correction. 1e-12 is the most the InfiniBand specification allows a link to have;
# 1e-15 is what links with forward error correction (HDR, NDR) hold in practice.
FAIL_BER, WARN_BER = 1e-12, 1e-15
LEAST_SYMBOL_ERRORS = 10  # ibcheckerrs' default: fewer are the traces of a plug that was put in
# Maintenance of driver, cable or switch takes a link down a few times; once a day is a fault.
FLAPS_FREE, FLAPS_PER_DAY = 3, 1.0
FLAPS_WARN_PER_DAY = 1 / 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Error counter, with the daily number that infiniband-diags' ibcheckerrs calls an error."""

    per_day: int
    meaning: str
    grave: int | None = None  # times that number: a failure


RULES = {
    "link_error_recovery": Rule(per_day=10, meaning="the link retrained itself"),
    "port_rcv_errors": Rule(per_day=10, meaning="damaged packets came in"),
    "port_rcv_remote_physical_errors": Rule(per_day=100, meaning="packets came in that were damaged further away"),
    "port_xmit_constraint_errors": Rule(per_day=100, meaning="packets were refused on their way out"),
    "port_rcv_constraint_errors": Rule(per_day=100, meaning="packets were refused on their way in"),
    "local_link_integrity_errors": Rule(per_day=10, meaning="the link failed too often in a row"),
    "excessive_buffer_overrun_errors": Rule(per_day=10, meaning="its buffers overran"),
    "rx_icrc_encapsulated": Rule(per_day=10, meaning="damaged RoCE packets came in"),
    # Ours: packets that were lost or answered late cost a retry each; a healthy lossless fabric has almost none.
    "port_xmit_discards": Rule(per_day=1000, meaning="packets were discarded on their way out", grave=100),
    "VL15_dropped": Rule(per_day=1000, meaning="management packets were dropped"),
    "local_ack_timeout_err": Rule(per_day=100, meaning="a peer did not acknowledge in time", grave=100),
    "packet_seq_err": Rule(per_day=10_000, meaning="packets came out of order", grave=100),
    "rnr_nak_retry_err": Rule(per_day=100, meaning="a peer was not ready to receive", grave=100),
    "req_cqe_error": Rule(per_day=100, meaning="requests completed with an error", grave=100),
    "resp_cqe_error": Rule(per_day=100, meaning="responses completed with an error", grave=100),
    "req_remote_access_errors": Rule(per_day=100, meaning="a peer refused access"),
    "req_remote_invalid_request": Rule(per_day=100, meaning="a peer refused a request"),
    "roce_adp_retrans": Rule(per_day=10_000, meaning="RoCE packets were sent again", grave=100),
    "roce_slow_restart": Rule(per_day=10_000, meaning="RoCE restarted slowly after loss", grave=100),
    "out_of_sequence": Rule(per_day=10_000, meaning="packets came in out of sequence", grave=100),
    # Broadcom's names for the same, in hw_counters.
    "rx_roce_errors": Rule(per_day=10, meaning="damaged RoCE packets came in"),
    "rx_roce_discards": Rule(per_day=1000, meaning="RoCE packets were discarded on their way in", grave=100),
    "to_retransmits": Rule(per_day=100, meaning="a peer did not acknowledge in time", grave=100),
    "max_retry_exceeded": Rule(per_day=10, meaning="a peer did not answer any retry", grave=100),
    "missing_resp": Rule(per_day=100, meaning="a response did not come", grave=100),
    "seq_err_naks_rcvd": Rule(per_day=10_000, meaning="a peer missed packets", grave=100),
    "rnr_naks_rcvd": Rule(per_day=100, meaning="a peer was not ready to receive", grave=100),
    "oos_drop_count": Rule(per_day=10_000, meaning="packets came in out of sequence", grave=100),
    "unrecoverable_err": Rule(per_day=10, meaning="a connection broke for good"),
    "bad_resp_err": Rule(per_day=100, meaning="a response was invalid"),
    "remote_access_err": Rule(per_day=100, meaning="a peer refused access"),
    "remote_invalid_req_err": Rule(per_day=100, meaning="a peer refused a request"),
    "res_tx_pci_err": Rule(per_day=10, meaning="the PCIe bus failed on the way out"),
    "res_rx_pci_err": Rule(per_day=10, meaning="the PCIe bus failed on the way in"),
}
# Highest value of a counter of the port management (InfiniBand specification, PortCounters): it stops there.
FULL = {
    "local_link_integrity_errors": 15,
    "excessive_buffer_overrun_errors": 15,
    "link_downed": 255,
    "link_error_recovery": 255,
    "port_xmit_constraint_errors": 255,
    "port_rcv_constraint_errors": 255,
    "symbol_error": 65_535,
    "port_rcv_errors": 65_535,
    "port_rcv_remote_physical_errors": 65_535,
    "port_xmit_discards": 65_535,
    "VL15_dropped": 65_535,
}
_ACTION = "clean or replace its cable and transceiver, clear the counters (`perfquery -R`), and look again in a day"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counters of a port, and those that could not be read, by reason."""

    port: _rdma_devices.Port
    board: str
    counters: dict[str, int]
    unread: tuple[str, ...]  # they are there and give no number
    refused: tuple[str, ...] = ()  # of counters/: they answer EINVAL, as where the device does not have them
    troubles: tuple[_trouble.Trouble, ...] = ()
    driver: str | None = None
    virtual: bool = False  # a virtual or scalable function: its counters may be those of the hypervisor
    bridge: str | None = None  # proof that it manages NVSwitches

    @property
    def without(self) -> bool:
        """Whether it has no port management: each counter of it is refused."""
        return bool(self.refused) and not set(self.counters) & set(FULL) and not self.unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    ports: tuple[Counted, ...]
    days: float  # uptime of the machine
    devices: tuple[_rdma_devices.Device, ...] = ()


def read(host: Host) -> Counters:
    """Every port with its error counters, and the machine's uptime in days."""
    devices = tuple(device for device in _rdma_devices.read(host) if not device.efa)
    bridges = _roles.find_bridges(host, devices)
    counted = tuple(_count(host, port, device, bridges) for device in devices for port in device.ports)
    match = re.match(r"(\d+\.\d+) ", host.read("/proc/uptime"), flags=re.ASCII) if counted else None
    if counted and not match:
        raise HostError("/proc/uptime does not begin with the seconds since boot")
    return Counters(ports=counted, days=float(match[1]) / DAY_S if match else 0.0, devices=devices)


def judge(data: Counters, expect: Expect) -> list[Finding]:
    silent = _rdma_devices.judge_troubles(data.devices)
    if not data.ports:
        if silent:
            return silent
        if implies_rdma(expect):
            return [error("there is no port whose errors could be counted", action="see ib_ports")]
        return [
            skip("no InfiniBand or RoCE device here and none expected", proof="/sys/class/infiniband shows no port")
        ]
    return [*(_judge_port(reading, data) for reading in data.ports), *silent]


def _judge_port(reading: Counted, data: Counters) -> Finding:
    """What was counted, before what could not be read."""
    name, counters, days = reading.port.name, reading.counters, max(data.days, LEAST_DAYS)
    values: dict[str, Any] = {"days": round(days, 2), **counters}
    bad, worst = _excess(reading.port, counters, days)
    lacking = _judge_lacking(reading, data, values)
    if bad and (worst or lacking is None or lacking.verdict is Verdict.SKIP):
        return (fail if worst else warn)("; ".join(bad), action=_ACTION, device=name, **values)
    if lacking is not None and bad:
        return replace(lacking, reason="; ".join([lacking.reason, *bad]))
    if lacking is not None:
        return lacking
    shown = {key: number for key, number in counters.items() if number}
    summary = ", ".join(f"{key} {number}" for key, number in shown.items())
    return ok(f"no more errors than a sound link has ({summary})" if summary else "no errors", device=name, **values)


def _judge_lacking(reading: Counted, data: Counters, values: dict[str, Any]) -> Finding | None:
    """Finding about counters that were not read; None: none is missing."""
    name, folder = reading.port.name, f"{reading.port.folder}/counters"
    if reading.troubles:
        answering = sum(not other.troubles for other in data.ports)
        # The adapter's own silence first, then what another user could read.
        worst = min(reading.troubles, key=lambda trouble: not trouble.silent)
        return _trouble.judge(worst, device=name, answering=answering, **values)
    if reading.bridge is not None and (reading.refused or reading.unread):
        proof = f"it manages NVSwitches: {reading.bridge}"
        return skip("it keeps no error counters", proof=proof, device=name, **values)
    if reading.virtual and reading.without and not reading.counters:
        proof = f"{folder} answers Invalid argument: a virtual function"
        return skip("it keeps no error counters", proof=proof, device=name, **values)
    action = f"read {folder} by hand"
    if absent := _absent(reading, list(data.ports)):
        what = "no error counters" if not reading.counters else f"no {', '.join(absent[:4])}"
        return error(f"it shows {what}, and equal ports do", action=action, device=name, **values)
    exemption = _find_exemption(reading, data) if reading.without else None
    if exemption is not None:
        return None if reading.counters else skip("it keeps no error counters", proof=exemption, device=name, **values)
    if reading.unread or reading.refused:
        reason = f"{', '.join((*reading.unread, *reading.refused)[:4])} cannot be read"
        reason += "" if reading.unread else ": Invalid argument"
        return error(reason, action=action, device=name, **values)
    if not reading.counters and not reading.virtual and (reading.driver or "").startswith("mlx"):
        reason = "it shows no error counter, and every port of its driver has them"
        return error(reason, action=action, device=name, **values)
    if not reading.counters:
        return skip("it keeps no error counters", proof=f"{reading.port.folder} has no error counter", device=name)
    return None


def _find_exemption(reading: Counted, data: Counters) -> str | None:
    """What shows that a port without port management needs none; None: it should have it."""
    said = f"{reading.port.folder}/counters answers Invalid argument"
    if reading.virtual:
        return f"{said}: a virtual function"
    if not (reading.driver or "").startswith("mlx"):
        return f"{said}, as every port of the driver {reading.driver} does"
    # Limited functions whose place on the bus is not shown: four of a board of their own, beside rails that count.
    equal = [other for other in data.ports if other.board == reading.board]
    boards = Counter(other.board for other in data.ports if not other.without and not other.troubles)
    limited = all(other.without and other.port.link_layer == "InfiniBand" for other in equal)
    if reading.board and len(equal) == _roles.FUNCTIONS and limited and max(boards.values(), default=0) >= 4:
        return f"{said}, as all {len(equal)} of the board {reading.board} do; {max(boards.values())} of another count"
    return None


def _absent(reading: Counted, counted: list[Counted]) -> list[str]:
    """Counters that most ports of the same board and link layer show, and this one does not."""
    layers = {reading.port.link_layer} if reading.port.link_layer in _rdma_devices.LAYERS else set(_rdma_devices.LAYERS)
    equal = [other for other in counted if other.board == reading.board and other.port.link_layer in layers]
    usual = Counter(name for other in equal for name in (*other.counters, *other.unread))
    return sorted(
        name
        for name, count in usual.items()
        if 2 * count > len(equal) and name not in (*reading.counters, *reading.unread, *reading.refused)
    )


def _excess(port: _rdma_devices.Port, counters: dict[str, int], days: float) -> tuple[list[str], bool]:
    """Sentences for excessive counters, and whether they are a failure."""
    bad: list[str] = []
    worst = False
    flaps = counters.get("link_downed", 0)
    if flaps > FLAPS_FREE + FLAPS_WARN_PER_DAY * days:
        bad.append(f"the link went down {flaps} times in {days:.3g} days (link_downed)")
        worst = flaps > FLAPS_FREE + FLAPS_PER_DAY * days
    symbols = counters.get("symbol_error", 0)
    ber = symbols / ((port.rate_gbps or 100.0) * 1e9 * days * DAY_S)
    if symbols > LEAST_SYMBOL_ERRORS and ber > WARN_BER:
        bad.append(f"{symbols} bit errors in {days:.3g} days, one in {1 / ber:.0e} bits (symbol_error)")
        worst = worst or ber > FAIL_BER
    for name, rule in RULES.items():
        if counters.get(name, 0) > rule.per_day * days:
            rate = counters[name] / (days * DAY_S)
            bad.append(f"{rule.meaning} {counters[name]:,} times in {days:.3g} days, {rate:.3g} a second ({name})")
            worst = worst or (rule.grave is not None and counters[name] > rule.grave * rule.per_day * days)
    for name, most in FULL.items():
        if counters.get(name) == most and not any(f"({name})" in words for words in bad):
            bad.append(f"{most:,} or more errors: the counter is full ({name})")
    return bad, worst or counters.get("link_downed") == FULL["link_downed"]


def _count(host: Host, port: _rdma_devices.Port, device: _rdma_devices.Device, bridges: Mapping[str, str]) -> Counted:
    counters: dict[str, int] = {}
    unread: list[str] = []
    refused: list[str] = []
    troubles: list[_trouble.Trouble] = []
    virtual = _roles.is_virtual(host, device)
    wanted = {"symbol_error", "link_downed", *RULES}
    for folder in ("counters", "hw_counters"):
        for name in sorted(wanted & set(_list(host, f"{port.folder}/{folder}", troubles))):
            try:
                text = host.read(f"{port.folder}/{folder}/{name}")
            except HostError as failure:
                trouble = _trouble.of(f"{port.folder}/{folder}/{name}", failure)
                if trouble.absent:
                    (refused if folder == "counters" else unread).append(name)
                else:
                    troubles.append(trouble)
                continue
            number = ibstat.parse_counter(text) if text.endswith("\n") else None
            if number is not None:
                counters[name] = number
            elif "no PMA" in text:
                virtual = True
            else:
                unread.append(name)
    return Counted(
        port=port,
        board=device.board,
        counters=counters,
        unread=tuple(unread),
        refused=tuple(refused),
        troubles=tuple(troubles),
        driver=device.driver,
        virtual=virtual,
        bridge=bridges.get(device.name),
    )


def _list(host: Host, folder: str, troubles: list[_trouble.Trouble]) -> tuple[str, ...]:
    try:
        return system_files.list_optional(host, folder) or ()
    except HostError as failure:
        troubles.append(_trouble.of(folder, failure))
        return ()

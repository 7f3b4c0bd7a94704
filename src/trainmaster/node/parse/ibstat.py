"""`ibstat`: every adapter and every port, with its state, rate and link layer; and the same words in /sys.

The layout is that of infiniband-diags/ibstat.c in linux-rdma/rdma-core. A port counts as up only if it says both
`State: Active` and `Physical state: LinkUp`; a state that is missing is None, and one said twice in different words
is kept as both ("Active|Down"), which is not Active.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trainmaster.node.parse import ParseError, as_text, read_float, read_int, shorten, split_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port, in ibstat's words. None: it said nothing."""

    number: int
    state: str | None
    physical_state: str | None
    rate_gbps: float | None
    link_layer: str | None
    base_lid: int | None
    sm_lid: int | None
    guid: str | None

    @property
    def up(self) -> bool:
        return self.state == "Active" and self.physical_state == "LinkUp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One channel adapter (CA)."""

    name: str
    type: str | None
    firmware: str | None
    port_count: int | None  # as many as it says it has
    node_guid: str | None
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ibstat:
    """Everything ibstat printed. `errors` are its own words of failure (ibpanic, ibwarn)."""

    adapters: tuple[Adapter, ...]
    errors: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


_HEAD = re.compile(r"(?P<kind>CA|Switch|Router|iWARP RNIC|\?\?\?):? '(?P<name>[^']{1,64})'")
_PORT = re.compile(r"Port (?P<number>\d{1,4}):")
_FIELD = re.compile(r"(?P<name>[A-Za-z?][\w? ]{0,40}): ?(?P<value>.*)")
_WRONG = re.compile(r"ib(?:panic|warn)\b.*|.*\b(?:can't|cannot|failed|No such|not found)\b.*")
_LAYERS = {"InfiniBand", "Ethernet", "Unspecified"}
_OF_ADAPTER = {
    "CA type": "type",
    "Switch type": "type",
    "Router type": "type",
    "iWARP RNIC type": "type",
    "??? type": "type",
    "Number of ports": "port_count",
    "Firmware version": "firmware",
    "Hardware version": "hardware",
    "Node GUID": "node_guid",
    "System image GUID": "system_guid",
}
_OF_PORT = {
    "State": "state",
    "Physical state": "physical_state",
    "Rate": "rate",
    "Base lid": "base_lid",
    "LMC": "lmc",
    "SM lid": "sm_lid",
    "Capability mask": "mask",
    "Port GUID": "guid",
    "Link layer": "link_layer",
}


@dataclass(slots=True)
class _Draft:
    name: str
    words: dict[str, str] = field(default_factory=dict)
    ports: list[tuple[int, dict[str, str]]] = field(default_factory=list)


def parse(raw: str | bytes) -> Ibstat:
    """The output of `ibstat`, with or without what it wrote to stderr."""
    drafts: list[_Draft] = []
    errors: list[str] = []
    faults: list[str] = []
    for line in split_lines(raw):
        text = line.strip()
        if text and not _read(text, drafts, faults):
            (errors if _WRONG.fullmatch(text) else faults).append(shorten(text))
    if not drafts and not errors:
        raise ParseError("not an output of ibstat: it names no adapter")
    adapters = tuple(_adapter(draft, faults) for draft in drafts)
    names = [adapter.name for adapter in adapters]
    if len(names) != len(set(names)):
        faults.append("an adapter comes twice")
    return Ibstat(adapters=adapters, errors=tuple(errors), faults=tuple(faults))


def parse_counter(raw: str | bytes) -> int | None:
    """A file of /sys/class/infiniband/*/ports/*/counters; None for `N/A (no PMA)` and the like."""
    value = read_int(as_text(raw).strip())
    return value if value is not None and value >= 0 else None


def parse_state(raw: str | bytes) -> str | None:
    """The word of /sys/class/infiniband/*/ports/*/state and phys_state: `4: ACTIVE`, `5: LinkUp`."""
    match = re.fullmatch(r"\d{1,2}: (?P<word>[A-Za-z<>_ ]{1,40})", as_text(raw).strip())
    return match["word"] if match else None


def parse_rate(raw: str | bytes) -> float | None:
    """Gb/s of /sys/class/infiniband/*/ports/*/rate: `400 Gb/sec (4X NDR)`."""
    match = re.fullmatch(r"(?P<rate>\d{1,6}(?:\.\d{1,3})?) Gb/sec(?: \([\w ]{1,20}\))?", as_text(raw).strip())
    return float(match["rate"]) if match else None


def parse_width(raw: str | bytes) -> int | None:
    """Lanes of /sys/class/infiniband/*/ports/*/rate: 4 of `400 Gb/sec (4X NDR)`."""
    match = re.search(r"\((?P<lanes>\d{1,2})X\b", as_text(raw))
    return int(match["lanes"]) if match else None


def _read(text: str, drafts: list[_Draft], faults: list[str]) -> bool:
    head = _HEAD.fullmatch(text)
    if head:
        drafts.append(_Draft(head["name"]))
        return True
    if not drafts:
        return False
    port = _PORT.fullmatch(text)
    if port:
        drafts[-1].ports.append((int(port["number"]), {}))
        return True
    item = _FIELD.fullmatch(text)
    if item is None:
        return False
    name, value = item["name"], item["value"].strip()
    if name in _OF_ADAPTER:
        words, key = drafts[-1].words, _OF_ADAPTER[name]
        if drafts[-1].ports:
            faults.append(f"{drafts[-1].name} has `{name}` below its ports: the head of an adapter may be missing")
    elif name in _OF_PORT and drafts[-1].ports:
        words, key = drafts[-1].ports[-1][1], _OF_PORT[name]
    else:
        return False
    if key in words:
        faults.append(f"{drafts[-1].name} says `{name}` twice")
        value = value if value == words[key] else f"{words[key]}|{value}"
    words[key] = value
    return True


def _adapter(draft: _Draft, faults: list[str]) -> Adapter:
    ports = tuple(_port(draft.name, number, words, faults) for number, words in draft.ports)
    count = read_int(draft.words.get("port_count"))
    if count is None:
        faults.append(f"{draft.name} does not say how many ports it has")
    elif len(ports) != count:
        faults.append(f"{draft.name} has {count} ports, but {len(ports)} are shown")
    if len({port.number for port in ports}) != len(ports):
        faults.append(f"a port of {draft.name} comes twice")
    return Adapter(
        name=draft.name,
        type=draft.words.get("type"),
        firmware=draft.words.get("firmware"),
        port_count=count,
        node_guid=draft.words.get("node_guid"),
        ports=ports,
    )


def _port(adapter: str, number: int, words: dict[str, str], faults: list[str]) -> Port:
    rate = read_float(words.get("rate", "").removesuffix(" (FDR10)"))
    missing = [name for name, key in _OF_PORT.items() if key not in words]
    if missing:
        faults.append(f"port {number} of {adapter} says nothing of {', '.join(missing)}")
    elif rate is None or not words["state"] or not words["physical_state"] or words["link_layer"] not in _LAYERS:
        faults.append(f"the state, rate or link layer of port {number} of {adapter} cannot be read")
    return Port(
        number=number,
        state=words.get("state") or None,
        physical_state=words.get("physical_state") or None,
        rate_gbps=rate,
        link_layer=words.get("link_layer") or None,
        base_lid=read_int(words.get("base_lid")),
        sm_lid=read_int(words.get("sm_lid")),
        guid=words.get("guid"),
    )

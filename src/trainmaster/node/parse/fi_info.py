"""`fi_info -p efa`: what libfabric offers. An EFA device shows as one domain per endpoint type (`rdmap79s0-rdm`).

With no provider of that name fi_info prints `fi_getinfo: -61 (No data available)` and nothing else. The layout is
that of util/info.c in ofiwg/libfabric, short form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainmaster.node.parse import ParseError, shorten, split_lines

NO_DATA = -61


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing libfabric can open. None: the line is missing."""

    provider: str | None
    fabric: str | None
    domain: str | None
    version: str | None
    type: str | None
    protocol: str | None

    @property
    def device(self) -> str | None:
        """The NIC behind the domain: `rdmap79s0` of `rdmap79s0-rdm`."""
        return self.domain.rsplit("-", 1)[0] if self.domain else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FiInfo:
    """Everything fi_info printed; `error` is libfabric's code, −61 for "no such provider"."""

    entries: tuple[Entry, ...]
    error: int | None = None
    error_text: str = ""
    faults: tuple[str, ...] = ()

    def devices(self, provider: str) -> tuple[str, ...]:
        """NICs that offer reliable datagrams through that provider, which is what NCCL needs."""
        return tuple(
            sorted(
                {
                    entry.device
                    for entry in self.entries
                    if entry.provider == provider and entry.type == "FI_EP_RDM" and entry.device is not None
                }
            )
        )


_FIELD = re.compile(r"\s*(?P<name>provider|fabric|domain|version|type|protocol): ?(?P<value>.*)")
_ERROR = re.compile(r"\s*fi_getinfo:? ?(?P<code>-\d{1,5})(?P<text>.*)")
_EFA = re.compile(r"[A-Za-z]\w+-(?:rdm|dgrm)")
_KEYS = ("provider", "fabric", "domain", "version", "type", "protocol")
# Each is read with the care its meaning needs: a damaged word is no device.
_SHAPES = {
    "provider": re.compile(r"[a-z][\w;.-]*"),
    "domain": re.compile(r"[A-Za-z][\w:.-]*"),
    "type": re.compile(r"FI_EP_[A-Z]+"),
    "protocol": re.compile(r"FI_[A-Z0-9_]+"),
    "version": re.compile(r"\d{1,6}\.\d{1,6}"),
    "fabric": re.compile(r"\S+"),
}


def parse(raw: str | bytes) -> FiInfo:
    """The short form of fi_info's output, with or without what it wrote to stderr."""
    drafts: list[dict[str, str]] = []
    faults: list[str] = []
    error, error_text = None, ""
    for line in split_lines(raw):
        failure = _ERROR.fullmatch(line)
        item = _FIELD.fullmatch(line)
        if failure:
            error, error_text = int(failure["code"]), failure["text"].strip(" ()")
        elif item:
            _take(item["name"], item["value"].strip(), drafts, faults)
        elif line.strip():
            faults.append(f"a line cannot be read: {shorten(line)}")
    if not drafts and error is None:
        raise ParseError("not an output of fi_info: neither a provider nor an error of fi_getinfo")
    for draft in drafts:
        lost = [key for key in _KEYS if key not in draft]
        if lost:
            faults.append(f"an entry of {draft.get('provider', 'an unnamed provider')} has no {', '.join(lost)}")
        elif draft["provider"] == "efa" and not _EFA.fullmatch(draft["domain"]):
            faults.append(f"the domain {shorten(draft['domain'])} is not named as EFA names its domains")
    entries = tuple(Entry(**{key: draft.get(key) for key in _KEYS}) for draft in drafts)
    return FiInfo(entries=entries, error=error, error_text=error_text, faults=tuple(faults))


def _take(name: str, value: str, drafts: list[dict[str, str]], faults: list[str]) -> None:
    if name == "provider" or not drafts or name in drafts[-1]:
        if name != "provider":
            # The line that names the provider is gone; its entry must not be counted for the one before.
            faults.append(f"an entry begins with `{name}`, not with its provider")
        drafts.append({})
    if not _SHAPES[name].fullmatch(value):
        faults.append(f"`{name}` cannot be read: {shorten(value)}")
        return
    drafts[-1][name] = value

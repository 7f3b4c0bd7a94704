"""What an XID or SXID means: severity and one action, from a table with its sources (checks/data/xid.toml).

A code that the table does not hold is `warn`, "unknown". A site lays its own table over ours, code by code. What Xid
144–150 (NVLink 5) ask for is decoded from the unit and the error status of their line.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

from trainmaster.core.compat import read_toml
from trainmaster.node.parse import ParseError, shorten
from trainmaster.node.parse.kernel_log import NVLINK5, RECOVERY, Nvlink, Sxid, Xid

Severity = Literal["info", "warn", "fail"]
_SEVERITIES: tuple[Severity, ...] = ("info", "warn", "fail")

# What the driver can ask for (nvmlDeviceGpuRecoveryAction_t); it spells the reset and the reboot in two ways.
_RECOVERY: dict[str, tuple[Severity, str]] = {
    "none": ("info", "nothing to do"),
    "gpu reset required": ("fail", "reset the GPU"),
    "pf flr": ("fail", "reset the GPU"),
    "reset": ("fail", "reset the GPU"),
    "node reboot required": ("fail", "reboot the node"),
    "os reboot": ("fail", "reboot the node"),
    "reboot": ("fail", "reboot the node"),
    "drain p2p": ("fail", "stop all work that uses NVLink on this GPU, then see whether the action clears"),
    "drain and reset": ("fail", "drain the GPU, then reset it"),
}


# What NVIDIA asks for after an error of NVLink 5, the gravest first: severity and action.
_NVLINK5: dict[str, tuple[Severity, str]] = {
    "reset": ("fail", "drain the GPU and reset it"),
    "recovery": ("warn", "do what Xid 154 of the same time asks for, if there is one; restart the job"),
    "reasons": ("warn", "nothing to do for the GPU; see why the host or an operator took the link down"),
    "link": ("warn", "nothing to do now; if it repeats, check that link and its cable"),
    "watch": ("warn", "nothing to do now; open a case with the vendor if it repeats"),
    "ignore": ("info", "nothing to do"),
}
Decode = Mapping[int, Mapping[str, Mapping[str, frozenset[int]]]]  # code → unit → what is asked for → error status


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEntry:
    """One row of the catalog. One action, not a list."""

    meaning: str
    severity: Severity
    action: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Both tables, and the decode of Xid 144–150."""

    xids: Mapping[int, XidEntry]
    sxids: Mapping[int, XidEntry]
    nvlink5: Decode

    def overlay(self, other: Catalog) -> Catalog:
        """This catalog with the rows of another laid over it."""
        nvlink5 = {code: {**self.nvlink5.get(code, {}), **other.nvlink5.get(code, {})} for code in NVLINK5}
        return Catalog(xids={**self.xids, **other.xids}, sxids={**self.sxids, **other.sxids}, nvlink5=nvlink5)

    def of_xid(self, xid: Xid) -> XidEntry:
        """What this event means; the text of codes 144–150 and 154 weighs more than the code."""
        row = self.xids.get(xid.code)
        if row is None:
            return XidEntry(
                meaning=f"unknown XID {xid.code}",
                severity="warn",
                action="look the code up in NVIDIA's XID catalog",
                source="not in the catalog",
            )
        if xid.code in NVLINK5 and xid.nvlink is not None:
            where = "the whole GPU" if xid.nvlink.link is None else f"link {xid.nvlink.link}"
            meaning = f"{row.meaning}: {xid.nvlink.unit} on {where}"
            severity, action = self._decode(xid.code, xid.nvlink)
            return replace(
                row,
                meaning=f"{meaning}, {'fatal' if xid.nvlink.fatal else 'not fatal'}",
                severity=severity,
                action=action,
            )
        if xid.code == RECOVERY and xid.recovery is not None:
            known = _RECOVERY.get(xid.recovery.strip().lower())
            severity, action = known or ("fail", f"do what the driver asks for: {shorten(xid.recovery)}")
            return replace(row, meaning=f"the driver asks for: {xid.recovery}", severity=severity, action=action)
        return row

    def _decode(self, code: int, error: Nvlink) -> tuple[Severity, str]:
        """What an error of NVLink 5 asks for. One that is not in the table is judged by the driver's word for it."""
        units = [self.nvlink5.get(code, {}).get(name, {}) for name in error.unit.split("/")]
        if any(error.reason in unit.get("reasons", ()) for unit in units):  # a reset mends nothing
            return _NVLINK5["reasons"]
        status = error.error_status
        asked = {name for unit in units for name, statuses in unit.items() if status in statuses and name != "reasons"}
        # Some units count in the status, others set one bit for each error.
        asked = asked or {name for unit in units for name, bits in unit.items() if any(status & bit for bit in bits)}
        if error.fatal or not asked:
            return _NVLINK5["reset" if error.fatal else "watch"]
        return next(said for name, said in _NVLINK5.items() if name in asked)

    def of_sxid(self, sxid: Sxid) -> XidEntry:
        """What this event means. A line that says Fatal is fatal, whatever the table says of its code."""
        row = self.sxids.get(sxid.code)
        if row is None:
            row = XidEntry(
                meaning=f"unknown SXID {sxid.code}",
                severity="warn",
                action="look the code up in the guide of the fabric manager",
                source="not in the catalog",
            )
        if sxid.fatal and row.severity != "fail":
            return replace(row, severity="fail", action="reset every GPU and NVSwitch of the node")
        return row


@functools.cache
def load() -> Catalog:
    """The catalog that ships with the package, read once: its TOML takes longer than all that is asked of it."""
    return parse((resources.files("trainmaster") / "checks" / "data" / "xid.toml").read_text(encoding="utf-8"))


def parse(text: str) -> Catalog:
    """A catalog in TOML: `[xid.79]` and `[sxid.20034]`, each with meaning, severity, action and source."""
    try:
        document = read_toml(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"the XID catalog is no valid TOML: {shorten(str(error))}") from None
    for name in document:
        if name not in ("xid", "sxid", "nvlink5", "source"):
            raise ParseError(f"the XID catalog has `{shorten(name)}`; it may have xid, sxid, nvlink5 and source")
    sources = document.get("source", {})
    return Catalog(
        xids=_table(document, "xid", sources),
        sxids=_table(document, "sxid", sources),
        nvlink5=_parse_decode(document.get("nvlink5", {})),
    )


def _parse_decode(document: Any) -> Decode:
    try:
        return {
            int(code): {
                str(unit): {name: frozenset(map(int, statuses)) for name, statuses in asked.items() if _NVLINK5[name]}
                for unit, asked in units.items()
            }
            for code, units in document.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        known = ", ".join(_NVLINK5)
        raise ParseError(f"`nvlink5` of the XID catalog is no table of codes, units and {known}") from None


def _table(document: Mapping[str, Any], name: str, sources: Any) -> dict[int, XidEntry]:
    table = document.get(name, {})
    if not isinstance(table, dict) or not isinstance(sources, dict):
        raise ParseError(f"`{name}` of the XID catalog is no table")
    rows: dict[int, XidEntry] = {}
    for key, row in table.items():
        where = f"{name}.{shorten(key)} of the XID catalog"
        if not key.isascii() or not key.isdigit() or len(key) > 6:
            raise ParseError(f"{where} is no code")
        fields = {"meaning", "severity", "action", "source"}
        if not isinstance(row, dict) or set(row) != fields or not all(isinstance(row[item], str) for item in fields):
            raise ParseError(f"{where} must have exactly meaning, severity, action and source, each a text")
        if row["severity"] not in _SEVERITIES:
            raise ParseError(f"{where} has the severity {row['severity']!r}; use info, warn or fail")
        # A short name stands for a source that many rows share.
        source = sources.get(row["source"], row["source"])
        rows[int(key)] = XidEntry(**{**row, "source": str(source)})
    return rows

"""Damage to a text: what a cut pipe, a mixed-up stream, a full disk or a newer version does to the output of a tool.

Every function takes its randomness from the caller, so a case is known by its seed. `kept` lines stay as they are.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Sequence
from typing import Any

WORDS = (
    *"N/A [N/A] ERR! Pass Fail Skip OK FAILED Active Down LinkUp nan inf -1 0 1e999 0x null".split(),
    *"Xid All GPU 99999999999999999999 # | + : { } [] via efa provider -61".split(),
    *("", "NCCL INFO", "GPUs: 0, 1", "Port 1:", "CA 'x'", "# Rank", "\t", "\x00", "\ufffd", "é", "१२", "\u2028"),
)
JUNK = "~^\x00\x07\ufffd¤"


def lines(rng: random.Random, text: str, others: Sequence[str], kept: Collection[str] = ()) -> str:
    """One to six changes to the lines of a text; a line among `kept` is moved by the others, never changed."""
    rows = text.split("\n")
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rows = _change(rng, rows, others, kept)
    return "\n".join(rows)


def _change(rng: random.Random, rows: list[str], others: Sequence[str], kept: Collection[str]) -> list[str]:
    free = [i for i, row in enumerate(rows) if row not in kept]
    if not free:
        return rows
    at = rng.choice(free)
    kind = rng.randrange(12)
    if kind == 0:
        return rows[:at] + rows[at + 1 :]
    if kind == 11:  # a line comes again, elsewhere
        place = _place(rng, rows, kept)
        return [*rows[:place], rows[at], *rows[place:]]
    if kind == 1:
        return rows[:at] + [rows[at]] * rng.choice((2, 2, 3, 20)) + rows[at + 1 :]
    if kind == 2:
        other = rng.choice(free)
        rows[at], rows[other] = rows[other], rows[at]
        return rows
    if kind == 3:  # cut off, after or before
        ahead = rng.random() < 0.3
        return [row for i, row in enumerate(rows) if row in kept or (i >= at if ahead else i < at)]
    if kind == 4:  # a stretch is lost
        end = at + rng.randrange(1, 12)
        return [row for i, row in enumerate(rows) if row in kept or not at <= i < end]
    if kind == 5:  # two outputs are mixed
        other = rng.choice(others).split("\n")
        start = rng.randrange(len(other))
        place = _place(rng, rows, kept)
        return rows[:place] + other[start : start + rng.choice((1, 1, 2, 5, 20))] + rows[place:]
    if kind == 6 and at + 1 < len(rows) and rows[at + 1] not in kept:  # a newline is lost
        return [*rows[:at], rows[at] + rows[at + 1], *rows[at + 2 :]]
    rows[at] = _spoil(rng, rows[at])
    return rows


def _place(rng: random.Random, rows: list[str], kept: Collection[str]) -> int:
    """Where something is put in: often right beside what must not be lost, because there it hurts most."""
    beside = [place for i, row in enumerate(rows) if row in kept for place in (i, i + 1)]
    return rng.choice(beside) if beside and rng.random() < 0.5 else rng.randrange(len(rows) + 1)


def _spoil(rng: random.Random, row: str) -> str:
    """Change characters, numbers or words of one line, or cut it."""
    kind = rng.randrange(5)
    if kind == 0 and row:
        at = rng.randrange(len(row))
        return row[:at] + chr((ord(row[at]) ^ (1 << rng.randrange(7))) or 1) + row[at + 1 :]
    if kind == 1:
        numbers = list(re.finditer(r"\d+", row))
        if numbers:
            found = rng.choice(numbers)
            value = rng.choice(
                ["", "0", "1", "7", "-3", "1.5", "9" * 25, str(int(found[0][:15]) + rng.choice((-1, 1, 8)))]
            )
            return row[: found.start()] + value + row[found.end() :]
    if kind == 2:
        words = list(re.finditer(r"\S+", row))
        if words:
            found = rng.choice(words)
            return row[: found.start()] + rng.choice(WORDS) + row[found.end() :]
    if kind == 3 and row:
        return row[: rng.randrange(len(row))]
    at = rng.randrange(len(row) + 1)
    return row[:at] + rng.choice(WORDS) + row[at:]


def erase(rng: random.Random, row: str, after: int = 0, before: int | None = None) -> str | None:
    """Only take away: the whole line, its end, or the sense of some of its characters. Never adds a meaning."""
    kind = rng.randrange(3)
    if kind == 0:
        return None
    places = [
        i for i, char in enumerate(row) if char.isalnum() and after <= i < (len(row) if before is None else before)
    ]
    if not places:
        return None
    if kind == 1:
        return row[: rng.choice(places)]
    spoiled = list(row)
    for at in rng.sample(places, min(len(places), rng.choice((1, 2, 5)))):
        spoiled[at] = rng.choice(JUNK)
    return "".join(spoiled)


def noise(rng: random.Random, samples: Sequence[str]) -> str | bytes:
    """Anything: bytes, characters, words of the format in no order, or a sample with bytes changed."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return "".join(
            chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), 10))) for _ in range(rng.randrange(120))
        )
    if kind == 2:
        tokens = re.findall(r"\S+|\n|\s+", rng.choice(samples)) or [""]
        return "".join(
            rng.choice((rng.choice(tokens), rng.choice(WORDS), "\n", " ")) for _ in range(rng.randrange(150))
        )
    raw = bytearray(rng.choice(samples).encode())
    for _ in range(rng.randrange(1, 20)):
        if raw:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.3 else raw)


_VALUES: list[Any] = [
    None,
    "",
    "Pass",
    "PASS",
    "Fail",
    "0",
    0,
    1,
    -1,
    10**30,
    1.5,
    True,
    [],
    {},
    "N/A",
    [None],
    {"status": "Pass"},
]


def tree(rng: random.Random, document: Any, kept: Sequence[str | int] | None = None) -> Any:
    """One to five changes to a JSON document; what lies under the path `kept` stays, and is still reached by it."""
    guarded, inside = _guard(document, kept)
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        node = document
        while True:
            children = list(node.items() if isinstance(node, dict) else enumerate(node))
            children = [(key, child) for key, child in children if id(child) not in inside]
            if not children:
                break
            key, child = rng.choice(children)
            if isinstance(child, (dict, list)) and child and (id(child) in guarded or rng.random() < 0.8):
                node = child
                continue
            if id(child) not in guarded:
                _replant(rng, node, key)
            break
    return document


def _guard(document: Any, kept: Sequence[str | int] | None) -> tuple[set[int], set[int]]:
    guarded, node = {id(document)}, document
    for key in kept or ():
        node = node[key]
        guarded.add(id(node))
    inside = {id(node)} if kept else set()
    return guarded - inside, inside


def _replant(rng: random.Random, node: Any, key: Any) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        del node[key]
    elif kind == 1:
        node[key] = json.loads(json.dumps(rng.choice(_VALUES)))
    elif isinstance(node, list):
        node.insert(rng.randrange(len(node) + 1), json.loads(json.dumps(node[key])))
    else:
        node[str(key) + rng.choice(("_", "2", " "))] = node.pop(key) if kind == 2 else json.loads(json.dumps(node[key]))

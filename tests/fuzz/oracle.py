"""One case: damage a sample, parse it, and see whether the parser kept its promises (trainmaster/node/parse)."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from fuzz import mutate
from fuzz.targets import Sample, Target
from trainmaster.node.parse import ParseError, as_text

KINDS = ("noise", "mix", "keep", "lose")


def run(target: Target, seed: int) -> str:
    """Run case number `seed`; AssertionError if a promise is broken. The kind of case it was."""
    rng = random.Random(seed)
    sick = [sample for sample in target.samples if sample.broken is not None]
    well = [sample for sample in target.samples if sample.lives_by or sample.lives_at]
    kind = rng.choice([kind for kind in KINDS if (kind != "keep" or sick) and (kind != "lose" or well)])
    if kind == "noise":
        check_noise(target, mutate.noise(rng, [sample.text for sample in target.samples]))
    elif kind == "mix":
        sample = rng.choice(target.samples)
        if sample.kept_path or sample.lives_at:
            check_noise(target, json.dumps(mutate.tree(rng, json.loads(sample.text)), indent=1))
        else:
            check_noise(target, mutate.lines(rng, sample.text, [other.text for other in target.samples]))
    elif kind == "keep":
        check_keep(target, rng.choice(sick), rng)
    else:
        check_lose(target, rng.choice(well), rng)
    return kind


def check_noise(target: Target, raw: str | bytes) -> None:
    """Nothing but ParseError, and no more healthy things than the text has words for."""
    found = _parse(target, raw)
    if found is not None:
        claims = target.healthy(found)
        target.broken(found)
        assert len(claims) <= max(target.evidence(as_text(raw)), 0), f"{sorted(claims)} out of nothing"


def check_keep(target: Target, sample: Sample, rng: random.Random) -> None:
    """What says that a thing is broken is untouched: it must still be seen."""
    if sample.kept_path is not None:
        raw = json.dumps(mutate.tree(rng, json.loads(sample.text), sample.kept_path), indent=1)
    else:
        raw = mutate.lines(rng, sample.text, [other.text for other in target.samples], sample.kept)
    found = _parse(target, raw)
    if found is not None:
        assert sample.broken in target.broken(found), f"{sample.broken} was lost"
        assert sample.broken not in target.healthy(found), f"{sample.broken} is called healthy"


def check_lose(target: Target, sample: Sample, rng: random.Random) -> None:
    """What a healthy thing lives by is taken away or spoiled: it must not be called healthy."""
    if sample.lives_at:
        name = rng.choice(sorted(sample.lives_at))
        document = json.loads(sample.text)
        _take(rng, document, rng.choice(sample.lives_at[name]))
        raw = json.dumps(document, indent=1)
    else:
        name = rng.choice(sorted(sample.lives_by))
        rows: list[str | None] = list(sample.text.split("\n"))
        numbers = sample.lives_by[name]
        for number in numbers if sample.all_lines else rng.sample(numbers, rng.randrange(1, len(numbers) + 1)):
            row = str(rows[number])
            at = row.find(sample.after) + len(sample.after) if sample.after and sample.after in row else 0
            end = re.search(sample.before, row) if sample.before else None
            rows[number] = mutate.erase(rng, row, at, end.start() if end else None)
            if sample.after and (rows[number] is None or len(rows[number] or "") < at):
                rows[number] = row[:at]
        raw = "\n".join(row for row in rows if row is not None)
    found = _parse(target, raw)
    if found is not None:
        assert name not in target.healthy(found), f"{name} is called healthy"


def _take(rng: random.Random, document: Any, path: tuple[str | int, ...]) -> None:
    """Remove the object at a path, or a key of it, or the sense of a value."""
    node = document
    for key in path[:-1]:
        node = node[key]
    if rng.random() < 0.3:
        del node[path[-1]]
        return
    thing = node[path[-1]]
    key = rng.choice([key for key in thing if key not in ("info", "entity_group_id")])
    if rng.random() < 0.5:
        del thing[key]
    else:
        thing[key] = rng.choice(["~", None, [], {}, "Pa~s", -5, 1.5])


def _parse(target: Target, raw: str | bytes) -> Any:
    try:
        return target.parse(raw)
    except ParseError as error:
        assert str(error), "an error without a sentence"
        return None

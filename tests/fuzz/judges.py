"""Judge layer of `make fuzz`: one answer of a recorded machine, or a file of nccl-tests, is damaged and then judged.

Every damage destroys: it empties, cuts, or writes N/A, ERR! or junk over values. It never writes another plausible
number, which no judge could tell from a measurement. A damaged answer that its check judges PASS is a defect, except:

- `unread`: the check read the same data as before, so the damage lies where it does not look;
- `elsewhere`: the check has the same findings as before, and another check that reads the answer refuses it: a run
  over the machine does not pass;
- `inert`: the check has the same findings as before, and every field that differs is listed in `inert.py`.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fuzz.files import FileScene, open_files, run_file
from fuzz.inert import differences, is_inert, judged_values
from fuzz.scenes import Node, Reading, Scene, read, scenes

from damaged import DamagedHost, Question, opened, worst  # isort: skip  # found by fuzz.scenes
from trainmaster import checks
from trainmaster.core.results import Finding, Verdict
from trainmaster.node.host import CommandResult

NAME = "judges"
WORDS = ("N/A", "[N/A]", "ERR!", "[Unknown Error]", "", "?", "\ufffd\ufffd", "~^~")
_VALUE = re.compile(r"(?<![\w.])\d[\w.:]*|\b(?:Yes|No|Active|Enabled|Disabled|Completed|Success|LinkUp|ACTIVE)\b")
_REFUSED = (Verdict.WARN, Verdict.ERROR, Verdict.FAIL)


_FILE_SHARE = 0.1  # of the cases: files of nccl-tests


@dataclass(frozen=True, kw_only=True)
class Field:
    """Everything that is damaged: answers of machines, and files."""

    scenes: Sequence[Scene]
    files: Sequence[FileScene]


def open_field(folder: Path | None = None, *, faults: int | None = None) -> Field:
    place = folder if folder is not None else Path(tempfile.mkdtemp(prefix="judges-"))
    return Field(scenes=scenes(place, faults=faults), files=open_files())


def run(field: Field, seed: int) -> str:
    """Run case number `seed`; AssertionError if damage was judged PASS. The kind of outcome."""
    rng = random.Random(seed)
    if rng.random() < _FILE_SHARE:
        return run_file(rng, rng.choice(field.files), damage)
    scene = rng.choice(field.scenes)
    question, answer = rng.choice(scene.answers)
    text = answer.stdout if isinstance(answer, CommandResult) else answer
    damaged = damage(rng, text)
    if damaged == text:
        return "unchanged"
    changed = replace(answer, stdout=damaged) if isinstance(answer, CommandResult) else damaged
    before = scene.node.reading(scene.check)
    after = read(scene.check, DamagedHost(scene.node.host, {question: changed}), scene.node.expect)
    kind, defect = classify(scene, question, changed, before, after)
    assert defect is None, f"{scene.node.name}, {scene.check}, {question[0]} {question[1]}: {defect}"
    return kind


def classify(scene: Scene, question: Question, changed: Any, before: Reading, after: Reading) -> tuple[str, str | None]:
    """The kind of outcome, and the defect if there is one."""
    how = opened(before.findings, after.findings)
    same = _judged(scene.check, before.findings) == _judged(scene.check, after.findings)
    if how is not None and not same:
        return "opened", how
    if worst(before.findings) is Verdict.FAIL and worst(after.findings) is Verdict.WARN:
        return "opened", f"fail became warn: {after.findings[0].reason}"
    if worst(after.findings) is not Verdict.PASS:
        return ("skipped" if worst(after.findings) is Verdict.SKIP else "refused"), None
    lost = list(differences(before.data, after.data))
    if not lost:
        return "unread", None
    if not same:
        return "opened", f"judged PASS with other values: {after.findings[0].reason}"
    superchip = scene.node.superchip
    if all(is_inert(scene.check, path, superchip=superchip) for path in lost):
        return "inert", None
    if find_refusal(scene.node, question, changed) is not None:
        return "elsewhere", None
    telling = [path for path in lost if not is_inert(scene.check, path, superchip=superchip)]
    return "opened", f"judged PASS by every check that reads it, without {', '.join(telling[:3])}"


def find_refusal(node: Node, question: Question, changed: Any) -> str | None:
    """A check that reads this answer and refuses the damaged one, which it did not refuse whole."""
    for name in checks.names():
        whole = node.reading(name)
        if question not in whole.asked:
            continue
        after = read(name, DamagedHost(node.host, {question: changed}), node.expect)
        if worst(after.findings) in _REFUSED and _judged(name, after.findings) != _judged(name, whole.findings):
            return name
    return None


def damage(rng: random.Random, text: str) -> str:
    """The text with something destroyed."""
    kind = rng.randrange(6)
    rows = text.split("\n")
    if kind == 0:
        return rng.choice(("", "\n", "N/A\n", "\x00\x00\n"))
    if kind == 1 and len(text) > 1:
        at = rng.randrange(1, len(text))
        return text[:at] if text[at - 1] != "\n" else text[: at - 1]
    if kind == 2:
        return _VALUE.sub(rng.choice(WORDS), text)
    values = list(_VALUE.finditer(text))
    if not values:
        return ""
    if kind == 3:  # some lines
        number = text[: rng.choice(values).start()].count("\n")
        rows[number] = _VALUE.sub(rng.choice(WORDS), rows[number])
        return "\n".join(rows)
    chosen = rng.choice(values)
    return text[: chosen.start()] + rng.choice(WORDS) + text[chosen.end() :]


def _judged(check: str, findings: list[Finding]) -> list[Any]:
    """Verdicts, devices and values, without what is only shown."""
    return [(finding.verdict, finding.device, judged_values(check, finding.values)) for finding in findings]

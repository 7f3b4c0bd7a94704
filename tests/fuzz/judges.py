"""Judge layer of `make fuzz`: one answer of a recorded machine is damaged, then the check that reads it judges it.

Every damage destroys: it empties, cuts, drops lines, or writes N/A, ERR! or junk over values. It never writes another
plausible number, which no judge could tell from a measurement. A judgement that keeps every finding and value as it was
rests on what was not damaged, and is counted as `unread`. All else must not be PASS.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "checks")]

import gpu_faults  # noqa: E402
import nodes  # noqa: E402
import system_faults  # noqa: E402
from damaged import DamagedHost, judge, opened, worst  # noqa: E402

from machines import H200, Machine  # noqa: E402
from trainmaster import checks  # noqa: E402
from trainmaster.core.expect import Expect  # noqa: E402
from trainmaster.core.results import Finding, Verdict  # noqa: E402
from trainmaster.node.host import Host, Ran, Snapshot  # noqa: E402

NAME = "judges"
WORDS = ("N/A", "[N/A]", "ERR!", "[Unknown Error]", "", "?", "\ufffd\ufffd", "~^~")
_VALUE = re.compile(r"(?<![\w.])\d[\w.:]*|\b(?:Yes|No|Active|Enabled|Disabled|Completed|Success|LinkUp|ACTIVE)\b")
_SETTINGS = ("nccl.conf", "xid.toml", "/sys/module", "LD_LIBRARY")
# Faults that damage of an answer cannot hide, one of each check.
_MOST_FAULTS = 60
_SHOWN = ("lines", "source", "torch", "torch_cuda", "vbios", "inforom", "serial")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A machine, a check, what the check finds on it, and every text answer that it read for that."""

    name: str
    host: Host
    check: str
    expect: Expect
    before: list[Finding]
    answers: Sequence[tuple[Any, Any]]


def scenes(folder: Path, *, faults: int = _MOST_FAULTS) -> list[Scene]:
    """The recorded machine, the composed ones, and machines with one fault each."""
    found: list[Scene] = []

    def add(name: str, make: Any, names: Sequence[str], expect: Expect) -> None:
        place = folder / f"{len(list(folder.iterdir()))}"
        shutil.copytree(H200, place)
        machine = Machine(place)
        make(machine)
        host = Snapshot(machine.host)
        for check in names:
            asked = DamagedHost(host)
            before = judge(check, asked, expect)
            answers = [(q, a) for q, a in asked.asked.items() if _is_text(a) and not _is_setting(q)]
            if answers:
                found.append(Scene(name=name, host=host, check=check, expect=expect, before=before, answers=answers))

    add("recorded H200", lambda machine: None, checks.names(), Expect())
    add("2 H200", lambda machine: gpu_faults.make(machine, 2), gpu_faults.CHECKS, Expect())
    for name in ("bare metal with InfiniBand", "bare metal with RoCE", "EFA", "container, cgroup v1"):
        add(name, nodes.HEALTHY[name], system_faults.MINE, Expect())
    for fault in system_faults.FAULTS[:faults]:
        add(fault.name, _both(fault.node, fault.break_it), [fault.check], Expect(**fault.expect))
    return found


def run(every: Sequence[Scene], seed: int) -> str:
    """Run case number `seed`; AssertionError if damage was judged PASS. The kind of outcome."""
    rng = random.Random(seed)
    scene = rng.choice(every)
    question, answer = rng.choice(scene.answers)
    text = answer.stdout if isinstance(answer, Ran) else answer
    damaged = damage(rng, text)
    if damaged == text:
        return "unchanged"
    changed = replace(answer, stdout=damaged) if isinstance(answer, Ran) else damaged
    after = judge(scene.check, DamagedHost(scene.host, {question: changed}), scene.expect)
    where = f"{scene.name}, {scene.check}, {question[0]} {question[1]}"
    how = opened(scene.before, after)
    if how is not None and _plain(scene.before) == _plain(after):
        how = None
    assert how is None, f"{where}: {how}"
    if worst(after) is not Verdict.PASS:
        return "refused" if worst(after) is not Verdict.SKIP else "skipped"
    assert _plain(scene.before) == _plain(after), f"{where}: judged PASS with other values: {after[0].reason}"
    return "unread"


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


def open_scenes() -> list[Scene]:
    return scenes(Path(tempfile.mkdtemp(prefix="judges-")))


def _plain(findings: list[Finding]) -> list[Any]:
    """What a judgement rests on: verdicts and measured values, without those that are only shown beside them."""
    return [
        (f.verdict, f.device, {k: v for k, v in f.values.items() if k not in _SHOWN and not _is_cpu_list(k, v)})
        for f in findings
    ]


def _is_cpu_list(key: str, value: object) -> bool:
    """The CPUs on which a probe ran, as the kernel lists them; a number of CPUs is judged."""
    return key == "cpus" and isinstance(value, (str, type(None)))


def _both(first: Any, second: Any) -> Any:
    def make(machine: Machine) -> None:
        first(machine)
        second(machine)

    return make


def _is_text(answer: Any) -> bool:
    return bool(answer.stdout if isinstance(answer, Ran) else answer) and isinstance(answer, (Ran, str))


def _is_setting(question: Any) -> bool:
    return any(word in str(question[1]) for word in _SETTINGS)

"""Files of nccl-tests for the judge layer of `make fuzz`: damaged, then judged as `trainmaster bandwidth` does."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.inert import differences
from trainmaster.bench import nccl_tests as judge_file
from trainmaster.core.results import CheckResult, Overall, judge_overall
from trainmaster.node.parse import ParseError, nccl_tests

SAMPLES = Path(__file__).parents[1] / "node" / "parse" / "samples"
FLOOR_GBPS = 1.0
# Sample and number of ranks that must have met.
FILES = (
    ("nccl-tests-2-nodes.txt", 16),
    ("nccl-tests-2-nodes.json", 16),
    ("nccl-tests-2019.txt", 8),
    ("nccl-tests-per-iteration.txt", 8),
    ("nccl-tests-wrong.txt", 8),
    ("nccl-tests-wrong.json", 8),
)
# Fields that no verdict rests on: shown, or stated twice. One verified side of a row is enough. A host without its
# number has another name, and with a stated floor the number of nodes decides nothing.
_INERT = re.compile(
    r"\.runs\[\d+\]\.(average_busbw_gbps|version|nccl_version|label|validated"
    r"|devices\[\d+\]\.(pid|host|bus_id|name|group|device)"
    r"|rows\[\d+\]\.(count|dtype|redop|root|(in_place|out_of_place)\.(wrong|delta|time_us)))"
)


@dataclass(frozen=True, kw_only=True)
class FileScene:
    """A file, what its parser reads from it, and its verdict."""

    name: str
    text: str
    ranks: int
    data: Any
    overall: Overall


def open_files() -> list[FileScene]:
    found = []
    for name, ranks in FILES:
        text = (SAMPLES / name).read_text()
        scene = FileScene(
            name=name, text=text, ranks=ranks, data=nccl_tests.parse(text), overall=_overall(_judge(text, ranks))
        )
        assert scene.overall in (Overall.PASS, Overall.FAIL), f"{name}: {_judge(text, ranks)}"
        found.append(scene)
    return found


def run_file(rng: random.Random, scene: FileScene, damage: Callable[[random.Random, str], str]) -> str:
    """Damage the file, judge it; AssertionError if it was judged PASS with something lost that matters."""
    damaged = damage(rng, scene.text)
    if damaged == scene.text:
        return "unchanged"
    result = _judge(damaged, scene.ranks)
    if _overall(result) is not Overall.PASS:
        return "refused"
    assert scene.overall is Overall.PASS, f"{scene.name}: {scene.overall} became PASS"
    try:
        lost = list(differences(scene.data, nccl_tests.parse(damaged)))
    except ParseError as error:
        raise AssertionError(f"{scene.name}: judged PASS and not parsed: {error}") from None
    telling = [path for path in lost if not _INERT.fullmatch(path)]
    assert not telling, f"{scene.name}: judged PASS without {', '.join(telling[:3])}"
    return "inert" if lost else "unread"


def _judge(text: str, ranks: int) -> CheckResult:
    return judge_file.judge(text, ranks=ranks, least_gbps=FLOOR_GBPS)


def _overall(result: CheckResult) -> Overall:
    return judge_overall([result], planned=[judge_file.CHECK])

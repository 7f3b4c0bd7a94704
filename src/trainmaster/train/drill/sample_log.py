"""Sample log: every sample that a rank consumed, for a drill to compare. Without a drill nothing is written.

TRAINMASTER_WITNESS=FOLDER     each rank appends one line a step to FOLDER/rank-N.jsonl: the number of its first sample,
                               a digest of each of its rows in order, and what its random numbers begin with; after a
                               recovery in place to FOLDER/restart-1/rank-N.jsonl, and so on

Digests are taken from what the model is given, after shuffling, packing and prefetching, so they cannot agree by
mistake; one line a rank and no collective, so that the run under test is the run users have.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.core.config.train import TrainConfig
from trainmaster.train.parallel.rank_info import RankInfo

if TYPE_CHECKING:  # reading the log must not import torch, which takes seconds
    from trainmaster.train.feed import Batch

WITNESS_VARIABLE = "TRAINMASTER_WITNESS"


class SampleLog:
    """Log of the samples that one rank consumes."""

    def __init__(self, rank_info: RankInfo, config: TrainConfig) -> None:
        folder = os.environ.get(WITNESS_VARIABLE)
        self._path = of_start(Path(folder), rank_info.restart) / f"rank-{rank_info.number}.jsonl" if folder else None
        self._first = rank_info.share(config.batch_sequences).start
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def note(self, batches: Sequence[Batch], *, step: int, cursor: int) -> None:
        """These are this rank's rows of the step that makes the run `step` steps long, its first sample `cursor`."""
        if self._path is None:
            return
        import torch

        rows = [digest for batch in batches for digest in _digests(batch)]
        self._write({"step": step, "first": cursor + self._first, "rows": rows, "draws": torch.initial_seed()})

    def note_passes(
        self, batches: Sequence[Batch], passes: Sequence[range], *, step: int, cursor: int, epoch: int
    ) -> None:
        """The same with replica groups, before the sum over the groups of an epoch: it counts if that is made."""
        for batch, part in zip(batches, passes, strict=True):
            if self._path is not None:
                line = {"step": step, "epoch": epoch, "first": cursor + part.start, "rows": _digests(batch)}
                self._write(line)

    def note_made(self, *, step: int, epoch: int) -> None:
        """The sum of a step was made in this epoch."""
        if self._path is not None:
            self._write({"step": step, "epoch": epoch, "made": True})

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def of_start(folder: Path, restart: int) -> Path:
    """Where the ranks log that were started again so many times in one attempt."""
    return folder / f"restart-{restart}" if restart else folder


def _digests(batch: Batch) -> list[str]:
    tokens, targets = batch.tokens.cpu().numpy(), batch.targets.cpu().numpy()
    # What begins where belongs to a packed sample: the same tokens under another mask are another lesson.
    documents = getattr(batch, "documents", None)
    borders = documents.cpu().numpy() if documents is not None else None
    digests = []
    for row in range(len(tokens)):
        digest = hashlib.sha256(tokens[row].tobytes() + targets[row].tobytes())
        if borders is not None:
            digest.update(borders[row].tobytes())
        digests.append(digest.hexdigest()[:16])
    return digests


def read(folder: Path) -> dict[int, dict[int, str]]:
    """Every step's samples of one attempt, all ranks together: step → sample number → digest.

    A step whose last line was cut off by a kill was not finished either, and counts for nothing.
    """
    steps: dict[int, dict[int, str]] = {}
    for line in _lines(folder.glob("rank-*.jsonl")):
        _add(steps.setdefault(line["step"], {}), line)
    return {step: dict(sorted(samples.items())) for step, samples in sorted(steps.items())}


def read_groups(folder: Path) -> dict[tuple[int, int], dict[int, str]]:
    """The same of an attempt with replica groups, all starts together: (step, epoch) → sample number → digest.

    Only of sums that were made. A step is in two epochs if the groups that had its sum were lost with it: then the
    later one counts.
    """
    sums: dict[tuple[int, int], dict[int, str]] = {}
    made: set[tuple[int, int]] = set()
    for line in _lines(folder.rglob("rank-*.jsonl")):
        key = line["step"], line["epoch"]
        if line.get("made"):
            made.add(key)
        else:
            _add(sums.setdefault(key, {}), line)
    return {key: sums.get(key, {}) for key in sorted(made)}


def _lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Every whole line of these files; a kill may cut off the last one."""
    for path in sorted(paths):
        for text in path.read_text().splitlines():
            try:
                yield json.loads(text)
            except ValueError:
                continue


def _add(samples: dict[int, str], line: Mapping[str, Any]) -> None:
    for number, digest in enumerate(line["rows"], start=line["first"]):
        # Two ranks that both took it would hide each other in a mapping.
        samples[number] = f"{samples[number]}+{digest}" if number in samples else digest

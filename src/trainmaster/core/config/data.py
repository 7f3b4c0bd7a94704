"""Data settings: sources of a run's samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from trainmaster.core.errors import Fault
from trainmaster.core.schema import YEAR_S, field

RAW = ("jsonl", "parquet", "text")  # local files that are tokenised before the first step
_NEEDS = {"prepared": "path", **dict.fromkeys(RAW, "path"), "hub": "dataset", "mix": "parts"}
MIX_SLOTS = 1021  # a prime: a mix keeps weights to one part in this many (datasets/mix.py)
# How samples are fetched. What they are does not depend on it, so a resumed run may change it.
_MANNER = ("cache", "prefetch_steps", "readers", "wait_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One place to read documents from."""

    source: str = field(
        default="tales",
        pattern=r"[a-z][a-z0-9_]*",
        example="tales",
        doc="tales, prepared, jsonl, parquet, text, hub or mix: a name in datasets/",
    )
    path: str | None = field(default=None, doc="folder made by `data prepare`; or a file, a folder or a glob of files")
    held_out_path: str | None = field(default=None, doc="the same for the held-out documents, instead of a share")
    dataset: str | None = field(default=None, doc="hub: the dataset's name, such as allenai/c4")
    subset: str | None = field(default=None, doc="hub: its configuration, such as en")
    split: str = field(default="train", doc="hub: which split to train on")
    held_out_split: str | None = field(default=None, doc="hub: which split to evaluate on, instead of a share")
    revision: str = field(default="main", doc="hub: branch, tag or commit; the run keeps the commit it began with")
    text_field: str = field(default="text", doc="field or column that holds a document's text")
    text_unit: Literal["file", "paragraph", "line"] = field(default="file", doc="text: what of a file is one document")


AnyOrigin = TypeVar("AnyOrigin", bound=Origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPart(Origin):
    """One source of a mix."""

    weight: float = field(default=1.0, gt=0, doc="its share of the samples, against the other parts' weights")

    def faults(self) -> Iterator[Fault]:
        if self.source == "mix":
            yield Fault(path="source", message="a mix cannot hold a mix; write all parts side by side")
        yield from _missing(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Origin):
    """Where samples come from. One global cursor numbers them, whatever the number of ranks."""

    seed: int = field(default=0, ge=0, doc="which stream of a generated or shuffled source")
    parts: tuple[DataPart, ...] = field(default=(), doc="mix: the sources to draw from")
    tokenizer: str = field(
        default="bytes",
        doc="of raw text: bytes, a tokenizer.json or its folder, or hub:NAME; prepared data has its own",
    )
    end_token: str | None = field(default=None, doc="token that ends a document; not stated: as the tokenizer says")
    rows: Literal["concat", "pack"] = field(
        default="concat", doc="concat: rows cut from one stream; pack: whole documents that do not see each other"
    )
    shuffle: bool = field(default=True, doc="another order in each pass over the data")
    held_out_share: float = field(
        default=0.005, ge=0, le=0.5, doc="of raw documents, by their content, kept for evaluations"
    )
    lanes: int | None = field(
        default=None,
        ge=1,
        most=65_536,
        doc="hub: readers over all ranks, a divisor of batch_sequences; not stated: up to 32",
    )
    cache: str | None = field(
        default=None, doc="folder for tokenised raw files; not stated: TRAINMASTER_CACHE, else ~/.cache/trainmaster"
    )
    prefetch_steps: int = field(default=2, ge=1, le=64, doc="steps whose samples are read ahead")
    readers: int = field(default=8, ge=1, le=256, doc="hub: threads of each rank that read and tokenise")
    wait_s: float = field(
        default=900.0, gt=0, le=YEAR_S, doc="how long a step waits for its data before the run ends (exit 65)"
    )

    def faults(self) -> Iterator[Fault]:
        yield from _missing(self)
        if self.parts and self.source != "mix":
            yield Fault(path="parts", message=f"stand beside source {self.source}; write source: mix")
        total = sum(part.weight for part in self.parts)
        for number, part in enumerate(self.parts):
            if part.weight * MIX_SLOTS < total:
                message = (
                    f"{part.weight:g} is {part.weight / total:.2g} of all weights; a mix draws at least 1/{MIX_SLOTS} "
                    f"from each part: use {total / MIX_SLOTS:.3g} or more, or leave the part out"
                )
                yield Fault(path=f"parts[{number}].weight", message=message)
        if self.held_out_path is not None and self.held_out_path == self.path:
            yield Fault(path="held_out_path", message="is the path itself; held-out documents must be others")
        if self.held_out_split is not None and self.held_out_split == self.split:
            yield Fault(path="held_out_split", message=f"is the split itself, {self.split}; choose another")

    @property
    def identity(self) -> DataConfig:
        """The part that decides which samples a run sees; a checkpoint is tied to it. How they are fetched may change.

        Data may also be moved. Its fingerprint, which a checkpoint holds too, shows that it is still the same.
        """
        defaults = {item.name: item.default for item in fields(DataConfig)}
        manner: dict[str, Any] = {name: defaults[name] for name in _MANNER}
        parts = tuple(_anywhere(part) for part in self.parts)
        return _anywhere(replace(self, parts=parts, **manner))

    def of_part(self, part: DataPart) -> DataConfig:
        """The config of one source of the mix: its own origin, and everything else as the mix has it."""
        origin = {item.name: getattr(part, item.name) for item in fields(Origin)}
        return replace(self, parts=(), **origin)


def _anywhere(origin: AnyOrigin) -> AnyOrigin:
    path = None if origin.path is None else "anywhere"
    return replace(origin, path=path, held_out_path=None if origin.held_out_path is None else "elsewhere")


def _missing(origin: Origin) -> Iterator[Fault]:
    needed = _NEEDS.get(origin.source)
    if needed is not None and not getattr(origin, needed, None):
        yield Fault(path=needed, message=f"missing; source {origin.source} reads it")

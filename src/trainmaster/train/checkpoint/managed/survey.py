"""Which managed checkpoints there are: the records of both tiers, and what was begun and never finished.

S3/NAMESPACE/records/step-00000050.s3.json      a step that is in S3 (and perhaps in memory)
S3/NAMESPACE/records/step-00000060.memory.json  a step that the daemon's memory alone holds
S3/NAMESPACE/NAMESPACE-4r/rank_0/step_50/…      what the library wrote, from 4 ranks
daemon: namespace NAMESPACE-records, rank 0     the same records, for when S3 cannot be asked
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from trainmaster.core.config.managed import ManagedConfig
from trainmaster.core.errors import CheckpointError, ObjectMissing, StorageError
from trainmaster.storage import open_store
from trainmaster.train.checkpoint.managed.library import Library, Tier, TierError
from trainmaster.train.checkpoint.managed.record import Record, parse, render

_RECORD = re.compile(r"records/step-(\d{8,})\.(memory|s3)\.json")
_OBJECT = re.compile(r"[\w-]+/rank_(\d+)/step_(\d+)/(checkpoint\.pt|metadata\.metadata)")
_IN_MEMORY = 3  # steps that the daemon retains, as the library asks of it


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was found. `whole` in the order in which it is to be tried."""

    whole: list[tuple[Tier, Record]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)  # what cannot be used: where, why
    unknown: str = ""  # why a tier could not be asked
    newest: int | None = None  # step that was ever saved, as far as is known
    exist: bool = False  # a checkpoint is, or was
    in_s3: bool = False  # S3 has a record, and so a witness

    def saw(self, step: int) -> None:
        self.exist, self.newest = True, max(step, self.newest or 0)


class Records:
    """The records of one namespace. Used by rank 0, but for `delete`."""

    def __init__(self, library: Library, config: ManagedConfig) -> None:
        self._library = library
        self.base = f"{config.s3.rstrip('/')}/{config.namespace}"
        self.store = open_store(self.base)
        self.in_s3 = False  # whether S3 has any

    def write(self, record: Record) -> Record:
        """Write the record to both tiers, S3 first; returns it with the tiers that hold the step from now on."""
        try:
            self.store.put(_name(record), render(record))
            self.in_s3 = True
        except StorageError as error:
            # Without one in S3, a daemon that lost its memory would look like one that never had any.
            if not self.in_s3 or not record.memory:
                raise CheckpointError(f"its record could not be put into {self.base}: {error}") from error
            record = replace(record, s3=False)
            self._library.write_record(record.step, render(record))
            return record
        if record.memory:
            with contextlib.suppress(TierError):  # it is found by the record in S3
                self._library.write_record(record.step, render(record))
        return record

    def drop_old(self, *, keep: int, keep_every: int | None, newest: int) -> list[str]:
        """Delete the records that are older than the `keep` newest in S3; returns the objects to be deleted now.

        In this order: killed in between, objects are left over, and no record of what is no longer there.
        """
        names = self._list_names()
        past = sorted((step for step, tier in names if tier == "s3" and step <= newest), reverse=True)
        if len(past) <= keep:
            return []
        objects: list[str] = []
        for (step, tier), name in names.items():
            if step >= past[keep - 1] or (tier == "s3" and keep_every is not None and step % keep_every == 0):
                continue
            if tier == "s3":
                objects += self._objects(name)
            self.store.delete(name)
        return objects

    def delete(self, objects: Iterable[str]) -> None:
        for path in objects:
            self.store.delete(path)

    def _objects(self, name: str) -> list[str]:
        try:
            return [uri[len(self.base) + 1 :] for uri in self._library.s3_parts(parse(self.store.get(name)))]
        except (CheckpointError, ObjectMissing):
            return []  # its parts cannot be located any more

    def _list_names(self) -> dict[tuple[int, Tier], str]:
        matches = ((_RECORD.fullmatch(item.path), item.path) for item in self.store.list("records"))
        return {_key(match): path for match, path in matches if match}

    def find_in_s3(self, survey: Survey) -> dict[tuple[Tier, int], Record]:
        """Every record in S3 that can be read; what cannot goes to the survey."""
        paths = [item.path for item in self.store.list()]
        records: dict[tuple[Tier, int], Record] = {}
        names = sorted(((_key(match), path) for path in paths if (match := _RECORD.fullmatch(path))), reverse=True)
        survey.in_s3 = bool(names)
        for number, ((step, tier), path) in enumerate(names):
            survey.saw(step)
            if tier == "memory" and number >= _IN_MEMORY:
                continue  # its parts have long been replaced
            try:
                record = parse(self.store.get(path))
            except (CheckpointError, ObjectMissing) as error:
                survey.remarks.append((f"{self.base}/{path}", str(error)))
                continue
            if record.s3:
                records["s3", step] = record
            if record.memory and number < _IN_MEMORY:
                records["memory", step] = record
        self._find_unfinished(paths, survey)
        return records

    def _find_unfinished(self, paths: list[str], survey: Survey) -> None:
        """Steps newer than every record: a rank was lost while they were saved."""
        parts: dict[int, set[str]] = defaultdict(set)
        for match in filter(None, map(_OBJECT.fullmatch, paths)):
            if survey.newest is None or int(match[2]) > survey.newest:
                parts[int(match[2])].add("index" if match[3] != "checkpoint.pt" else f"rank {match[1]}")
        for step, names in sorted(parts.items(), reverse=True):
            why = f"never finished: it has no record, only {', '.join(sorted(names))}"
            survey.remarks.append((f"{self.base} step {step}", why))
            # The library calls it whole, and there is no record of any step: the records were removed.
            survey.exist = survey.exist or ("index" in names and survey.newest is None)

    def find_in_memory(self, survey: Survey) -> dict[tuple[Tier, int], Record]:
        records: dict[tuple[Tier, int], Record] = {}
        library = self._library
        for step in library.list_steps(library.records):
            where = f"{library.daemon}/{library.records} step {step}"
            text = library.read_record(step)
            if text is None:
                continue  # replaced since it was listed
            survey.saw(step)
            try:
                records["memory", step] = parse(text)
            except CheckpointError as error:
                survey.remarks.append((where, str(error)))
        for namespace in sorted({library.namespace, *(record.namespace for record in records.values())}):
            for step in library.list_steps(namespace):
                if survey.newest is None or step > survey.newest:
                    why = "never finished: it has no record"
                    survey.remarks.append((f"{library.daemon}/{namespace} step {step}", why))
        return records


def survey(records: Records, library: Library) -> Survey:
    """Survey both tiers. A tier that cannot be read is not an empty one, and is named in `unknown`."""
    result, unknown = Survey(), []
    by_tier: dict[tuple[Tier, int], Record] = {}
    try:
        by_tier = records.find_in_s3(result)
    except StorageError as error:
        unknown.append(str(error))
        result.remarks.append((records.base, f"cannot be asked, only the daemon's memory is: {error}"))
    try:
        # The daemon's own records count for it: S3 may hold the one of an earlier attempt at the same step.
        by_tier |= records.find_in_memory(result)
    except TierError as error:
        unknown.append(str(error))
        lost = sorted(step for tier, step in by_tier if tier == "memory")
        by_tier = {key: record for key, record in by_tier.items() if key[0] != "memory"}
        was_there = f"; step {lost[-1]} was saved there" if lost else ""
        result.remarks.append((library.daemon, f"cannot be asked, only S3 is: {error}{was_there}"))
    order = sorted(by_tier, key=lambda key: (-key[1], key[0]))  # newest first, and "memory" before "s3"
    result.whole = [(tier, by_tier[tier, step]) for tier, step in order]
    result.unknown = "; ".join(unknown)
    return result


def _name(record: Record) -> str:
    return f"records/step-{record.step:08d}.{'s3' if record.s3 else 'memory'}.json"


def _key(match: re.Match[str]) -> tuple[int, Tier]:
    return int(match[1]), "s3" if match[2] == "s3" else "memory"

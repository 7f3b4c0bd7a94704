"""A set of runs: a job spec with `matrix:`, expanded to one spec per trial, or with `search:`, filled trial by trial.

With `schedule:` the trials of the matrix, or the one job, begin again at every time of it (cron.py).

    matrix: {train.optimizer.lr: [1e-4, 3e-4], env.SEED: ["1", "2"], size: [small, large]}
    parallel: 2

A key with a dot, or of a field of the spec, is a place in it. Any other is a variable: `{size}` stands for its value in
`command` and in values of `env`. The last key varies fastest. Trials are numbered from 1 and named NAME-1, NAME-2, …
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from trainmaster.core.config.cron import MOST_WAITING, Schedule
from trainmaster.core.config.search import MOST_TRIALS, Search
from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.schema import build, to_plain
from trainmaster.core.spec import JobSpec, parse_spec

KEYS = ("matrix", "search", "parallel", "schedule")
# Of the specs of all trials: each is checked and kept by itself, and a request is multiplied by as many.
MOST_BYTES = 16 << 20
_FIELDS = frozenset(item.name for item in fields(JobSpec))
_VARIABLE = re.compile(r"[a-z][a-z0-9_]{0,62}")
# Of the whole set: one name, one bill, one checkpoint folder each.
_FIXED = ("name", "project", "resume_from")
# Of a whole search too: what a submission may use is decided once, before there is a proposal.
_SUBMITTED = ("project", "target", "workdir", "allow")
_LONGEST_SCHEDULED = 63 - 9  # a run a minute, of a hundred trials each, has eight digits after a year
_FIXED_IN_SEARCH = frozenset((*_FIXED, *_SUBMITTED, "rent", "after", "schedule"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a set."""

    number: int  # from 1
    values: Mapping[str, Any]  # of the matrix
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All runs of a set, and how many may be open at once.

    With `search` the trials are not known yet: these hold every choice and both ends of every range, to be checked.
    """

    name: str
    project: str
    parallel: int
    trials: tuple[Trial, ...]
    document: Mapping[str, Any] = field(default_factory=dict)  # that it was made of
    search: Search | None = None
    schedule: Schedule | None = None  # at each of its times all trials begin

    @property
    def total(self) -> int:
        """Runs in all."""
        return len(self.trials) if self.search is None else self.search.total

    @property
    def template(self) -> dict[str, Any]:
        """The document that each trial of a search is made of: as written, but for what the submission has changed.

        What is varied has its first value: what it was written over was checked by nobody, and might be a secret.
        """
        first = self.trials[0]
        plain = {key: value for key, value in self.document.items() if key not in KEYS}
        filled = _put_fields(plain, first.values, "search.parameters")
        return {
            **filled,
            "after": to_plain(first.spec.after),
            **{name: getattr(first.spec, name) for name in _SUBMITTED},
        }


def is_sweep(mapping: object) -> bool:
    """Whether a document is a set of runs, and not one job."""
    return isinstance(mapping, Mapping) and any(key in mapping for key in KEYS)


def parse_sweep(mapping: Mapping[str, Any]) -> Sweep:
    """The trials of a document; SpecError with the faults of the matrix, or of the first trial that has some."""
    plain = {key: value for key, value in mapping.items() if key not in KEYS}
    schedule = _parse_schedule(mapping)
    if "search" in mapping:
        return _parse_search(mapping, plain)
    matrix, parallel = mapping.get("matrix"), mapping.get("parallel")
    alone = schedule is not None and "matrix" not in mapping
    if faults := [*_find_faults({} if alone else matrix, plain, alone=alone), *_find_parallel(parallel)]:
        raise SpecError(faults)
    matrix = {} if alone else matrix
    assert isinstance(matrix, Mapping)
    trials = []
    for number, values in enumerate(itertools.product(*matrix.values()), 1):
        chosen = dict(zip(matrix, values, strict=True))
        spec = parse_spec(fill(plain, chosen, number))
        trials.append(Trial(number=number, values=chosen, spec=spec))
    first = trials[0].spec
    if schedule is not None and (scheduled := list(_find_unscheduled(plain, trials))):
        raise SpecError(scheduled)
    return Sweep(
        name=str(plain["name"]),
        project=first.project,
        parallel=int(parallel or len(trials)),
        trials=tuple(trials),
        document=dict(mapping),
        schedule=schedule,
    )


def _parse_schedule(mapping: Mapping[str, Any]) -> Schedule | None:
    if "schedule" not in mapping:
        return None
    value = mapping["schedule"]
    if "search" in mapping:
        raise SpecError([Fault(path="schedule", message="does not go with `search`: leave out one of the two")])
    if not isinstance(value, Mapping):
        raise SpecError([Fault(path="schedule", message='write its times: schedule: {cron: "0 3 * * *"}')])
    return build(Schedule, value, path="schedule")


def _find_unscheduled(plain: Mapping[str, Any], trials: Sequence[Trial]) -> Iterator[Fault]:
    """What cannot begin again and again."""
    if len(trials) > MOST_WAITING:
        yield Fault(path="matrix", message=f"gives {len(trials)} trials; with `schedule` at most {MOST_WAITING}")
    if any(trial.spec.after.jobs for trial in trials):
        yield Fault(path="after", message="does not go with `schedule`: those jobs run once; leave out one of the two")
    if len({trial.spec.workdir for trial in trials}) > 1:
        yield Fault(path="matrix.workdir", message="is the same for all runs of a schedule")
    if len(str(plain["name"])) > _LONGEST_SCHEDULED:
        yield Fault(
            path="name", message=f"is too long for a schedule, which adds numbers; at most {_LONGEST_SCHEDULED}"
        )


def _parse_search(mapping: Mapping[str, Any], plain: Mapping[str, Any]) -> Sweep:
    faults = list(_find_parallel(mapping.get("parallel")))
    if "matrix" in mapping:
        faults.append(Fault(path="matrix", message="does not go with `search`: write one of the two"))
    try:
        search = build(Search, mapping["search"], path="search")
    except SpecError as error:
        raise SpecError([*faults, *error.faults]) from None
    probes = {key: list(space.probes()) for key, space in search.spaces.items()}
    for key, values in probes.items():
        fault = _find_fault(key, values, probes, plain)
        if key.partition(".")[0] in _FIXED_IN_SEARCH:
            fault = "is the same for the whole search"
        if fault:
            faults.append(Fault(path=f"search.parameters.{key}", message=fault))
    faults += _find_long_name(plain, search.total)
    sizes = {key: max(map(_size, values)) for key, values in probes.items()}
    faults += _find_large(plain, sizes, max(search.total, sum(map(len, probes.values()))), "search")
    if faults:
        raise SpecError(faults)
    first = {key: values[0] for key, values in probes.items()}
    others = [{**first, key: value} for key, values in probes.items() for value in values[1:]]
    trials = [
        Trial(number=number, values=chosen, spec=_parse_probe(plain, chosen, number))
        for number, chosen in enumerate([first, *others], 1)
    ]
    return Sweep(
        name=str(plain["name"]),
        project=trials[0].spec.project,
        parallel=int(mapping.get("parallel") or 1),
        trials=tuple(trials),
        document=dict(mapping),
        search=search,
    )


def _parse_probe(plain: Mapping[str, Any], chosen: Mapping[str, Any], number: int) -> JobSpec:
    """A spec with these values; a fault of one of them is placed where its parameter stands."""
    try:
        return parse_spec(fill(plain, chosen, number, section="search.parameters"))
    except SpecError as error:
        raise SpecError([_place(fault, chosen) for fault in error.faults]) from None


def _place(fault: Fault, chosen: Mapping[str, Any]) -> Fault:
    key = next((key for key in chosen if fault.path == key or fault.path.startswith((f"{key}.", f"{key}["))), None)
    if key is None:
        return fault
    return Fault(path=f"search.parameters.{key}", message=fault.message)


def _find_faults(matrix: object, plain: Mapping[str, Any], *, alone: bool) -> Iterator[Fault]:
    """What is wrong with a matrix; `alone`: there need be none."""
    if not isinstance(matrix, Mapping) or (not matrix and not alone):
        message = "write fields with the values to try: {train.optimizer.lr: [0.0001, 0.0003]}"
        yield Fault(path="matrix", message=message)
        return
    count = 1
    for key, values in matrix.items():
        if not isinstance(values, list) or not values:
            yield Fault(path=f"matrix.{key}", message="write a list of values")
            continue
        count *= len(values)
        if fault := _find_fault(str(key), values, matrix, plain):
            yield Fault(path=f"matrix.{key}", message=fault)
    if count > MOST_TRIALS:
        yield Fault(path="matrix", message=f"gives {count:,} trials; at most {MOST_TRIALS:,} are one set")
    else:
        means = {
            key: sum(map(_size, values)) / len(values)
            for key, values in matrix.items()
            if isinstance(values, list) and values
        }
        yield from _find_large(plain, means, count, "matrix")
    yield from _find_long_name(plain, count)


def _find_large(plain: Mapping[str, Any], sizes: Mapping[str, float], count: int, path: str) -> Iterator[Fault]:
    """A set whose trials are too large together; `sizes` are those of the values, by key."""
    texts = list(_texts(plain))
    each = _size(plain)
    for key, size in sizes.items():
        uses = sum(text.count(f"{{{key}}}") for text in texts) if _is_variable(str(key)) else 1
        each += math.ceil(size * (uses + 1))  # the value is kept beside the spec too
    if each * count > MOST_BYTES:
        text = f"{count:,} trials of about {each:,} bytes are {each * count:,} in all; a set has at most {MOST_BYTES:,}"
        yield Fault(path=path, message=f"{text}: vary less, or put long texts in a file of the working folder")


def _size(value: object) -> int:
    return len(repr(value))


def _find_long_name(plain: Mapping[str, Any], count: int) -> Iterator[Fault]:
    name = plain.get("name")
    if isinstance(name, str) and len(name) + len(str(count)) + 1 > 63:
        yield Fault(path="name", message="is too long: the number of a trial is added to it")


def _find_fault(key: str, values: list[Any], matrix: Mapping[str, Any], plain: Mapping[str, Any]) -> str | None:
    """What is wrong with a key and its values."""
    head = key.partition(".")[0]
    if any(_has_nul(value) for value in values):
        return "a value holds a NUL character (\\0), which no text of a job may"
    if not all(_is_plain(value) for value in values):
        return "a value is neither text nor a number; put it in quotes: '2026-01-01'"
    if any(str(other).startswith(f"{key}.") for other in matrix):
        return "another key is a part of it: one of the two would be lost"
    if head in _FIXED:
        return "is the same for the whole set"
    if head in _FIELDS:
        return None
    if "." in key:
        return f"{head} is no field of a spec"
    if not _VARIABLE.fullmatch(key):
        return "is neither a field of a spec nor a name of lower-case letters"
    if any(value is None or isinstance(value, (list, dict)) for value in values):
        return "stands in texts: write texts, numbers or true and false"
    if not _uses(plain, key):
        return f"is no field of a spec, and {{{key}}} stands neither in `command` nor in a value of `env`"
    return None


def _find_parallel(parallel: object) -> Iterator[Fault]:
    stated = isinstance(parallel, int) and not isinstance(parallel, bool) and 1 <= parallel <= MOST_TRIALS
    if parallel is not None and not stated:
        yield Fault(path="parallel", message=f"write how many trials may be open at once, 1 to {MOST_TRIALS}")


def _has_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nul, (*value, *value.values())))
    return any(map(_has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\x00" in value


def _is_plain(value: object) -> bool:
    """Whether a value can be kept as JSON; YAML also has dates."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (str, int, float))


def _uses(plain: Mapping[str, Any], name: str) -> bool:
    return any(f"{{{name}}}" in text for text in _texts(plain))


def _texts(plain: Mapping[str, Any]) -> Iterator[str]:
    """Where a variable may stand."""
    command, env = plain.get("command"), plain.get("env")
    yield from map(str, command if isinstance(command, list) else ())
    yield from map(str, env.values() if isinstance(env, Mapping) else ())


def fill(
    plain: Mapping[str, Any], chosen: Mapping[str, Any], number: int, *, section: str = "matrix"
) -> dict[str, Any]:
    """The document of one trial; `section` is where its values are stated, for faults."""
    made = _put_fields(plain, chosen, section)
    texts = {
        f"{{{key}}}": str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in chosen.items()
        if _is_variable(key)
    }
    if texts and isinstance(made.get("command"), list):
        made["command"] = [_replace(word, texts) for word in made["command"]]
    if texts and isinstance(made.get("env"), dict):
        made["env"] = {name: _replace(word, texts) for name, word in made["env"].items()}
    if isinstance(made.get("name"), str):
        made["name"] = f"{made['name']}-{number}"
    return made


def _put_fields(plain: Mapping[str, Any], chosen: Mapping[str, Any], section: str) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(dict(plain))
    for key, value in chosen.items():
        if not _is_variable(key):
            _put(made, key, copy.deepcopy(value), section)
    return made


def _is_variable(key: str) -> bool:
    return "." not in key and key not in _FIELDS


def _put(made: dict[str, Any], path: str, value: Any, section: str) -> None:
    here: Any = made
    *parents, last = path.split(".")
    for name in parents:
        here = here.setdefault(name, {}) if isinstance(here, dict) else None
    if not isinstance(here, dict):
        raise SpecError([Fault(path=f"{section}.{path}", message="goes through a value that has no fields")])
    here[last] = value


def _replace(word: Any, texts: Mapping[str, str]) -> Any:
    """The word with its variables filled in, once: a value is no template, or ten short ones would be a gigabyte."""
    if not isinstance(word, str) or not any(name in word for name in texts):
        return word
    return re.sub("|".join(map(re.escape, texts)), lambda found: texts[found[0]], word)

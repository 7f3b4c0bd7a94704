"""Optuna asked for one trial or one verdict: a study in memory, made anew each time from the rows of a search.

Nothing is kept between two questions, neither in a process nor in a storage of Optuna. A sampler gets a seed of its own
for each trial, made of that of the search and the trial's number. So a proposal depends only on the search, the number,
and the trials it is given: the same rows give the same proposal, in any process (of the same versions of Optuna and
numpy).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainmaster.core.config.search import Choice, FloatRange, Search, Space, to_word
from trainmaster.core.errors import MissingExtra


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A trial as a proposal or a verdict sees it."""

    values: Mapping[str, Any]
    state: str = "running"  # running, complete, pruned, failed
    value: float | None = None
    reports: Mapping[int, float] = field(default_factory=dict)  # of the metric, by step
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of the pruner


def require() -> Any:
    """Optuna, quiet; MissingExtra where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra("search", "search") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it tells of every study
    return optuna


def propose(search: Search, trials: Sequence[Seen]) -> dict[str, Any]:
    """Values of the trial after these, by parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of features that Optuna calls experimental
        optuna = require()
        storage = optuna.storages.InMemoryStorage()
        sampler = _make_sampler(optuna, search, number=len(trials) + 1)
        study = _make_study(optuna, search, trials, storage=storage, sampler=sampler)
        asked = study.ask(fixed_distributions=_distributions(optuna, search)).params
    spaces = search.spaces
    return {key: _from_optuna(spaces[key], asked[key]) for key in search.parameters}


def find_stop(
    search: Search, trials: Sequence[Seen], number: int, reports: Sequence[tuple[int, float]]
) -> tuple[int | None, dict[str, Any]]:
    """The first of these new reports of a trial at which it is pruned, by its step; and what the pruner keeps with it.

    Reports are judged one after the other: it makes no difference how many of them came at once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optuna = require()
        storage = optuna.storages.InMemoryStorage()
        sampler = optuna.samplers.RandomSampler(seed=search.seed)  # not asked here
        study = _make_study(optuna, search, trials, storage=storage, sampler=sampler)
        pruner = _make_pruner(optuna, search)
        trial_id = storage.get_all_trials(storage.get_all_studies()[0]._study_id)[number - 1]._trial_id
        for step, value in reports:
            storage.set_trial_intermediate_value(trial_id, step, value)
            if pruner.prune(study, storage.get_trial(trial_id)):
                return step, dict(storage.get_trial(trial_id).system_attrs)
        return None, dict(storage.get_trial(trial_id).system_attrs)


def _make_study(optuna: Any, search: Search, trials: Sequence[Seen], *, storage: Any, sampler: Any) -> Any:
    direction = "minimize" if search.goal == "min" else "maximize"
    study = optuna.create_study(storage=storage, sampler=sampler, direction=direction)
    states, distributions = optuna.trial.TrialState, _distributions(optuna, search)
    spaces = search.spaces
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                state={"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}.get(
                    trial.state, states.RUNNING
                ),
                value=trial.value if trial.state in ("complete", "pruned") else None,
                params={key: _to_optuna(spaces[key], value) for key, value in trial.values.items()},
                distributions=distributions,
                intermediate_values=dict(trial.reports),
                system_attrs=dict(trial.attributes),
            )
        )
    return study


def _make_sampler(optuna: Any, search: Search, *, number: int) -> Any:
    seed = int.from_bytes(hashlib.sha256(f"{search.seed} {number}".encode()).digest()[:4], "big")
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if search.sampler == "tpe":
        return optuna.samplers.TPESampler(n_startup_trials=search.startup_trials, seed=seed)
    spaces = search.spaces
    grid = {key: [_to_optuna(space, value) for value in space.grid() or ()] for key, space in spaces.items()}
    return optuna.samplers.GridSampler(grid, seed=search.seed)  # it shuffles the grid: once for all trials


def _make_pruner(optuna: Any, search: Search) -> Any:
    if search.pruner == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=search.startup_trials, n_warmup_steps=search.warmup_steps
        )  # fmt: skip
    if search.pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=search.warmup_steps, reduction_factor=search.reduction
        )  # fmt: skip
    return optuna.pruners.NopPruner()


def _distributions(optuna: Any, search: Search) -> dict[str, Any]:
    return {key: _distribution(optuna.distributions, space) for key, space in search.spaces.items()}


def _distribution(kinds: Any, space: Space) -> Any:
    if isinstance(space, Choice):
        return kinds.CategoricalDistribution([to_word(value) for value in space.values])
    if isinstance(space, FloatRange):
        return kinds.FloatDistribution(space.low, space.high, log=space.log, step=space.step)
    return kinds.IntDistribution(space.low, space.high, log=space.log, step=space.step or 1)


def _to_optuna(space: Space, value: Any) -> Any:
    """Choices are texts there: it takes no lists, and 1 for true."""
    return to_word(value) if isinstance(space, Choice) else value


def _from_optuna(space: Space, value: Any) -> Any:
    return json.loads(value) if isinstance(space, Choice) else value

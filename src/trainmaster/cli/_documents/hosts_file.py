"""The target of `--on` for check, accept, bandwidth and isolate; for other targets an error with another way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _yaml_file
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.sagemaker.check import SageMakerNodes
    from trainmaster.targets import ReachesNodes, RunsClusterJobs, Target


def load_nodes(word: str, *, verb: str) -> ReachesNodes:
    """The target that `--on` names, with nodes that can be reached one by one. UsageError for others."""
    from trainmaster import targets

    target = _load(word, verb)
    if not isinstance(target, targets.ReachesNodes):
        raise UsageError(_refuse(word, verb))
    return target


def load_cluster(word: str, *, verb: str) -> ReachesNodes | RunsClusterJobs:
    """The target that `--on` names, with nodes that can be reached one by one or as one job."""
    from trainmaster import targets

    target = _load(word, verb)
    if not isinstance(target, targets.ReachesNodes | targets.RunsClusterJobs):
        raise UsageError(_refuse(word, verb))
    return target


def load_training_job(word: str, count: int) -> SageMakerNodes:
    """The hosts of the training job that `check --on sagemaker:FILE` makes."""
    from trainmaster.cluster.sagemaker.check import load_nodes

    path = word.partition(":")[2]
    if not path:
        raise UsageError(f"--on {word}: write the settings file too: --on sagemaker:account.yaml")
    return load_nodes(Path(path), count)


def runs_as_job(word: str | None, verb: str) -> bool:
    """Whether a verb over nodes runs as one job that makes its own machines."""
    from trainmaster import targets

    kind = (word or "").partition(":")[0]
    return kind in targets.names() and verb in targets.traits(kind).one_job


def _load(word: str, verb: str) -> Target:
    """The target; a fault in its file is told by its line."""
    from trainmaster import targets

    kind, _, option = word.partition(":")
    if kind not in targets.names():
        raise UsageError(_refuse(word, verb))
    traits = targets.traits(kind)
    if traits.here or not (traits.nodes or verb in traits.one_job) or (traits.required and not option):
        raise UsageError(_refuse(word, verb))
    if traits.names_file(word):
        return _yaml_file.load(Path(option)).read(lambda _: targets.load(word))
    return targets.load(word)


def _refuse(word: str, verb: str) -> str:
    from trainmaster import targets

    kind, stated = word.partition(":")[0], {name: targets.traits(name) for name in targets.names()}
    places = [
        traits.spell(name)
        for name, traits in stated.items()
        if not traits.here and (traits.nodes or verb in traits.one_job)
    ]
    where = f"{verb} runs on {', '.join(places[:-1])} and {places[-1]}"
    if kind not in stated:
        return f"--on {word}: {kind!r} is not a target; {where}"
    if not stated[kind].here and (stated[kind].nodes or verb in stated[kind].one_job):
        return f"--on {word}: write the file too: --on {stated[kind].spell(kind)}"
    return f"--on {word}: {where}; on {kind}, {stated[kind].alternative(verb)}"

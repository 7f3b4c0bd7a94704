"""The target of `--on` for check, accept, bandwidth and isolate; for other targets an error with another way."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.sagemaker.check import SageMakerNodes
    from trainmaster.targets import ReachesNodes, RunsClusterJobs, Target

T = TypeVar("T")


def elsewhere(word: str | None) -> str | None:
    """The target of `--on`; None where it is this machine, as without `--on`."""
    from trainmaster import targets

    if word is None:
        return None
    stated = targets.find_traits(word)
    return None if stated is not None and stated.here and ":" not in word else word


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

    stated = targets.find_traits(word or "")
    return stated is not None and verb in stated.one_job


def ask(answer: Coroutine[Any, Any, T]) -> T:
    """Run a request to targets to its end, with the connections that they opened."""
    import asyncio

    from trainmaster import targets

    async def go() -> T:
        try:
            return await answer
        finally:
            await targets.close()

    return asyncio.run(go())


def _load(word: str, verb: str) -> Target:
    """The target of a word that the verb can use."""
    from trainmaster import targets

    traits, option = targets.find_traits(word), word.partition(":")[2]
    if traits is None or traits.here or not traits.has(verb) or (traits.required and not option):
        raise UsageError(_refuse(word, verb))
    traits.require_file(word)
    if traits.names_file(word):
        from trainmaster.documents import yaml_file

        yaml_file.load(Path(option))  # what cannot be read is told before anything begins
    return targets.load(word)


def _refuse(word: str, verb: str) -> str:
    from trainmaster import targets

    kind, stated, places = word.partition(":")[0], targets.find_traits(word), targets.spell_all(verb)
    where = f"{verb} runs on {', '.join(places[:-1])} and {places[-1]}"
    if stated is None:
        known = (
            f"a name of `trainmaster target add` is known to the server, for jobs; for {verb} write what it stands for"
        )
        return f"--on {word}: {kind!r} is no kind of target; {where}. {known} (`trainmaster target list`)"
    if stated.has(verb) and not stated.here:
        return f"--on {word}: write the file too: --on {stated.spell(kind)}"
    return f"--on {word}: {where}; on {kind}, {stated.alternative(verb)}"

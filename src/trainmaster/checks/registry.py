"""Registry of the checks: the modules of four folders, and the plan of a run over them.

The folder is the registry: a module of gpu/, active/, fabric/ or system/ without a leading underscore is a check.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Sequence
from typing import cast

from trainmaster.checks import active, fabric, gpu, system
from trainmaster.checks.contract import LEVELS, TIMEOUT_S, Check, find_faults
from trainmaster.core.errors import UsageError

FOLDERS = (gpu, active, fabric, system)


def names() -> list[str]:
    """Names of all checks, sorted."""
    return sorted(_folders())


def load(name: str) -> Check:
    """Import the check of that name. One without its facts cannot be used: what it leaves out would not be judged."""
    module = importlib.import_module(f"{_folders()[name]}.{name}")
    if faults := find_faults(module):
        raise TypeError(f"{module.__name__}: {'; '.join(faults)}")
    return cast(Check, module)


def level_of(name: str) -> int:
    """Level of a check. One that cannot be imported is planned at every level, so that its error is reported."""
    try:
        return int(load(name).LEVEL)
    except Exception:
        return LEVELS[0]


def timeout_of(name: str) -> float:
    """Seconds that the runner waits for a check."""
    try:
        return float(getattr(load(name), "TIMEOUT_S", TIMEOUT_S))
    except Exception:
        return TIMEOUT_S


def plan(level: int, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """Names that `runner.run` will report on, in order. Level 0 plans none."""
    known = names()
    for word in (*only, *skip):
        if word not in known:
            begin = [name for name in known if name.startswith(f"{word}_")]
            close = begin or difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"there is no check {word}; {hint}")
    wanted = [name for name in known if (not only or name in only) and name not in skip]
    above = [name for name in wanted if level_of(name) > level]
    if only and above:
        raise UsageError(f"{above[0]} needs --level {level_of(above[0])}; this is level {level}")
    planned = [name for name in wanted if name not in above]
    if level and not planned:
        raise UsageError("no check is left; skip fewer checks, or use level 0 to run none on purpose")
    return planned


def paths() -> tuple[tuple[str, ...], ...]:
    """Places of the four folders: where they are the same, so are the checks."""
    return tuple(tuple(folder.__path__) for folder in FOLDERS)


def _folders() -> dict[str, str]:
    """Package of each check."""
    return _modules_of(paths())


@functools.cache  # a run asks for it several times a check
def _modules_of(paths: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    return {
        module.name: folder.__name__
        for folder, path in zip(FOLDERS, paths, strict=True)
        for module in pkgutil.iter_modules(path)
        if not module.name.startswith("_")
    }

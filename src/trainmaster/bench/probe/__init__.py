"""Probes: active tests of one GPU, each in a process of its own. `python -m trainmaster.bench.probe NAME --gpu N`.

A probe is a module of this folder with

    DEADLINE_S: float               it gives up by itself then, and says at which step it hung
    def measure(run: Run) -> None   fills run.results; names each step before it takes it

It prints one JSON object and knows no threshold: what its numbers mean is judged elsewhere (checks/), from the printed
text alone, so that a recorded run can be judged again. A process may crash, hang or be killed by the driver; that is
why there is one per GPU, and why the others' results do not depend on it.

Every probe also runs with `--device cpu`, at a tiny size: the same code, so that it is tested where there is no GPU.
"""

from __future__ import annotations

import pkgutil


def names() -> list[str]:
    """Every probe there is: the modules of this folder whose name has no leading underscore."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))

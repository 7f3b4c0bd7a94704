"""Model presets: dimensions, published size and source of both (data/presets.toml)."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trainmaster.core.errors import Fault, SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A known model. Tests compare `model` with the two parameter counts."""

    name: str
    model: Mapping[str, Any]  # fields of ModelConfig
    parameters: int
    active_parameters: int  # that one token passes through; less than all in a mixture of experts
    source: str
    lr: float | None = None  # published peak learning rate of its pre-training
    lr_source: str | None = None


def find(name: str) -> Preset:
    """The preset of this name; SpecError with the nearest name if there is none."""
    known = _load()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"
    raise SpecError([Fault(path="preset", message=f"there is no preset {name[:60]!r}; {hint}")])


def names() -> list[str]:
    """Every preset, smallest first within its family, as the file has them."""
    return list(_load())


@functools.cache
def _load() -> Mapping[str, Preset]:
    text = resources.files("trainmaster.core").joinpath("data", "presets.toml").read_text()
    return {
        name: Preset(
            name=name,
            model=entry["model"],
            parameters=entry["parameters"],
            active_parameters=entry.get("active_parameters", entry["parameters"]),
            source=entry["source"],
            lr=entry.get("lr"),
            lr_source=entry.get("lr_source"),
        )
        for name, entry in tomllib.loads(text).items()
    }

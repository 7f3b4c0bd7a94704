"""Model families and their presets: dimensions, published size and source of both.

The tables lie in the families' own folders (models/*/presets.toml). They are read here as data, because a bad spec must
be refused by the control plane, which never imports a model.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trainmaster.core.compat import read_toml
from trainmaster.core.errors import Fault, SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFacts:
    """What a spec may state of a family."""

    title: str
    options: frozenset[str]  # fields of ModelConfig beside the dimensions that its model computes
    needs: frozenset[str] = frozenset()  # of these, the ones that must be stated


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A known model. Tests compare `model` with the two parameter counts."""

    name: str
    family: str
    model: Mapping[str, Any]  # fields of ModelConfig
    parameters: int
    active_parameters: int  # that one token passes through; less than all in a mixture of experts
    source: str
    lr: float | None = None  # published peak learning rate of its pre-training
    lr_source: str | None = None


def find(name: str) -> Preset:
    """The preset of this name; SpecError with the nearest name if there is none."""
    known = _presets()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"
    raise SpecError([Fault(path="preset", message=f"there is no preset {name[:60]!r}; {hint}")])


def names() -> list[str]:
    """Every preset, family by family, as the files have them."""
    return list(_presets())


def family_of(model: Mapping[str, Any]) -> str:
    """The family of a shape that states none."""
    return "llama" if model.get("experts") is None else "moe"


@functools.cache
def families() -> Mapping[str, FamilyFacts]:
    """Every family: the folders of models/ that have presets."""
    return {
        name: FamilyFacts(
            title=document["family"]["title"],
            options=frozenset(document["family"]["options"]),
            needs=frozenset(document["family"].get("needs", ())),
        )
        for name, document in _documents().items()
    }


@functools.cache
def _presets() -> Mapping[str, Preset]:
    return {
        name: Preset(
            name=name,
            family=family,
            # Stated only where the shape would otherwise be taken for another family's: what is written beside a
            # preset can then still make a mixture of a dense model.
            model=entry["model"] if family_of(entry["model"]) == family else {"family": family, **entry["model"]},
            parameters=entry["parameters"],
            active_parameters=entry.get("active_parameters", entry["parameters"]),
            source=entry["source"],
            lr=entry.get("lr"),
            lr_source=entry.get("lr_source"),
        )
        for family, document in _documents().items()
        for name, entry in document.items()
        if name != "family"
    }


@functools.cache
def _documents() -> Mapping[str, Mapping[str, Any]]:
    folders = sorted(resources.files("trainmaster.models").iterdir(), key=lambda folder: folder.name)
    tables = {folder.name: folder / "presets.toml" for folder in folders if folder.is_dir()}
    return {name: read_toml(table.read_text()) for name, table in tables.items() if table.is_file()}

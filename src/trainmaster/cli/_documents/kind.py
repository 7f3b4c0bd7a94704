"""Job specs and training configs told apart, so that one given for the other is explained and not listed as faults."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import UsageError
from trainmaster.core.spec import JobSpec

if TYPE_CHECKING:
    from trainmaster.documents.yaml_file import Document

_SPEC = frozenset(field.name for field in fields(JobSpec))
_CONFIG = frozenset(field.name for field in fields(TrainConfig))


def require_config(document: Document, path: Path) -> None:
    """UsageError for a job spec where a training config is needed."""
    names = _names(document)
    if names & {"train", "command"} and len(names & _SPEC) > len(names & _CONFIG):
        raise UsageError(
            f"{path} is a job spec, and this verb reads a training config: run `trainmaster submit {path}`, or put the "
            "fields of its `train:` section into a file of their own"
        )


def require_spec(document: Document, path: Path) -> None:
    """UsageError for a training config where a job spec is needed."""
    names = _names(document)
    if not names & {"train", "command"} and len(names & _CONFIG) > len(names & _SPEC):
        raise UsageError(
            f"{path} is a training config, and this verb reads a job spec: run `trainmaster train {path}`, or put its "
            "fields under `train:` and add a `name:`"
        )


def refuse_program(path: Path) -> None:
    """UsageError for a program where a job spec is needed, and for a spec that is not there yet."""
    start = "start from: trainmaster examples command.yaml > job.yaml"
    if path.suffix in (".py", ".sh", ".ipynb"):
        raise UsageError(f"{path} is a script, not a spec; {start}")
    if not path.exists() and not path.suffix and shutil.which(str(path)):  # `submit python train.py`
        raise UsageError(f"{path} is a program, not a spec; write the command into one, and {start}")
    if not path.exists():
        raise UsageError(f"{path} cannot be read: No such file or directory; {start}")


def _names(document: Document) -> set[str]:
    return set(map(str, document.value)) if isinstance(document.value, dict) else set()

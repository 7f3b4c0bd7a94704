"""The weights of a checkpoint alone, in one process and without a group: for export, and for a run to start from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from trainmaster.core.compat import UTC
from trainmaster.core.config.train import ModelConfig
from trainmaster.core.errors import CheckpointError, SpecError, UsageError
from trainmaster.core.schema import build, to_plain
from trainmaster.models import family
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import Manifest
from trainmaster.train.state import State

Advance = Callable[[int], None]  # called with the number of further bytes done
_PREFIX = "model."


class Weights:
    """The weights of a checkpoint whose every byte was verified."""

    def __init__(self, path: Path, manifest: Manifest, *, advance: Advance = lambda _: None) -> None:
        self.path, self.manifest = path, manifest
        for name, record in manifest.files.items():
            fault = manifests.find_fault(path, {name: record}, deep=True)
            if fault is not None:
                raise CheckpointError(f"{path} is damaged: {fault}")
            advance(record.size_bytes)
        self.config = _config_of(path, manifest)
        # A pickle; read only now that its hash has matched.
        self._index = FileSystemReader(path).read_metadata()
        self._held = {
            key.removeprefix(_PREFIX): (tuple(held.size), held.properties.dtype)
            for key, held in self._index.state_dict_metadata.items()
            if key.startswith(_PREFIX) and isinstance(held, TensorStorageMetadata)
        }
        held = {name: shape for name, (shape, _) in self._held.items()}
        wanted = family.weight_shapes(self.config)
        different = sorted(name for name in {*held, *wanted} if held.get(name) != wanted.get(name))
        if different:
            raise CheckpointError(f"{path} does not hold the model it names: {', '.join(different[:3])} differ")

    def read(self, name: str) -> Tensor:
        """One weight, whole, from however many shards it was written in."""
        shape, dtype = self._held[name]
        whole = torch.empty(shape, dtype=dtype)
        with _alone():
            load_shards({_PREFIX + name: whole}, storage_reader=_Reader(self.path, self._index), no_dist=True)
        return whole


def find_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """A checkpoint, or the newest one in a folder of them, with its manifest.

    A damaged one is never replaced by an older one: an export must be of the step that was asked for.
    """
    steps = manifests.list_steps(path) if path.is_dir() else []
    if steps:
        path = manifests.path_of(path, steps[0])
    elif not path.is_dir() or not path.name.startswith("step-"):
        raise UsageError(f"{path}: neither a checkpoint (a folder named step-…) nor a folder of them")
    try:
        return path, manifests.read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be trusted: {error}; name an older one to take that instead") from None


def save_weights(
    folder: Path, config: ModelConfig, read: Callable[[str], Tensor], *, advance: Advance = lambda _: None
) -> Path:
    """Commit a checkpoint of step 0 that holds weights and nothing else; `read` is asked for one at a time.

    It belongs to no data and has no optimizer, so no run resumes from it; `init_from` starts one with its weights.
    """
    if manifests.list_steps(folder):
        raise UsageError(f"{folder} holds checkpoints already; choose another folder")
    draft = folder / f"{manifests.path_of(folder, 0).name}.tmp"
    manifests.begin(draft)
    # Without memory: the planner fetches each weight when its turn to be written comes.
    empty = {_PREFIX + name: torch.empty(shape, device="meta") for name, shape in family.weight_shapes(config).items()}
    # A file for each weight: torch keeps what it wrote into a file in memory until that file is done.
    writer = FileSystemWriter(draft, single_file_per_rank=False, sync_files=True, overwrite=False)
    with _alone():
        save_shards(empty, storage_writer=writer, planner=_Fetching(read, advance), no_dist=True)
    files = {entry.name: manifests.measure(entry) for entry in sorted(draft.iterdir())}
    manifest = Manifest(
        step=0,
        state=asdict(State()),
        run={"model": to_plain(config)},
        files=files,
        ranks=1,
        torch=torch.__version__,
        saved_at=datetime.now(UTC).isoformat(),
    )
    return manifests.commit(draft, manifest)


@contextmanager
def _alone() -> Iterator[None]:
    """Suppress torch's warning about a missing process group, which it prints even with no_dist."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


class _Reader(FileSystemReader):
    """Reads the index once, not once for every weight."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._known = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._known


class _Fetching(DefaultSavePlanner):
    """Plans by shapes alone and asks for a weight when it is written: at most two are in memory, this and the last."""

    def __init__(self, read: Callable[[str], Tensor], advance: Advance) -> None:
        super().__init__()
        self._read, self._advance = read, advance

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        weight = self._read(index.fqn.removeprefix(_PREFIX))
        self._advance(weight.nbytes)
        return weight


def _config_of(path: Path, manifest: Manifest) -> ModelConfig:
    try:
        return build(ModelConfig, manifest.run.get("model"))
    except SpecError as error:
        raise CheckpointError(f"{path}: its manifest does not name a model of this version: {error}") from None

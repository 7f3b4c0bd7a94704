"""HF model folders: config.json and safetensors, one file or several with an index. Read and written per tensor.

No weight is transposed or permuted: the layouts are the same (see rope.py). Only the experts of a mixture, which are
stacked here, are split and stacked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor

from trainmaster.core.config.train import ModelConfig
from trainmaster.core.errors import Fault, MissingExtra, SpecError, UsageError
from trainmaster.core.files import sync
from trainmaster.models import family
from trainmaster.models.hf_config import from_hf, to_hf
from trainmaster.models.hf_names import DERIVED, HEAD

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FLOATS = ("F32", "BF16", "F16", "F64")  # others are quantised: their numbers mean nothing without their scales
_SHOWN = 3  # faults of one kind named one by one

Read = Callable[[str], Tensor]  # our name of a weight → the whole of it
Advance = Callable[[int], None]  # called with the number of bytes done since the last call


class HfFolder:
    """Folder of HF weights, verified to be complete and of the shape in its config. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: ModelConfig = from_hf(_json(folder / CONFIG))
        self._family = family.of(self.config)
        self._open = ExitStack()
        self._holder: Mapping[str, Any] = {}  # HF's name → the open file that has it

    def __enter__(self) -> HfFolder:
        try:
            self._holder = self._find()
            self._check()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    def read(self, name: str) -> Tensor:
        """One whole weight, by our name, as float32."""
        parts = [self._holder[theirs].get_tensor(theirs).float() for theirs in self._family.hf_names(name, self.config)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _find(self) -> dict[str, Any]:
        safe_open = _safetensors().safe_open
        holder: dict[str, Any] = {}
        for file in _files(self.folder):
            try:
                opened = self._open.enter_context(safe_open(self.folder / file, framework="pt"))
            except Exception as error:  # its error type is not exported by every version
                raise UsageError(f"{self.folder / file}: cannot be read: {error}") from None
            holder.update(dict.fromkeys(opened.keys(), opened))
        return holder

    def _check(self) -> None:
        """Check that every weight is present, of its shape and not quantised, and that no tensor is ignored."""
        faults = []
        expected = {}
        for name, shape in self._family.weight_shapes(self.config).items():
            names = self._family.hf_names(name, self.config)
            expected.update(dict.fromkeys(names, (shape[0] // len(names), *shape[1:])))
        for theirs, shape in expected.items():
            if theirs not in self._holder:
                faults.append(f"{theirs} is missing")
                continue
            part = self._holder[theirs].get_slice(theirs)
            if tuple(part.get_shape()) != shape:
                faults.append(f"{theirs} is {list(part.get_shape())}, and the config makes it {list(shape)}")
            elif part.get_dtype() not in _FLOATS:
                faults.append(f"{theirs} is {part.get_dtype()}; only unquantised weights can be read")
        # A tied head is the embedding; some files have it all the same.
        spare = {HEAD} if self.config.tied else set()
        left = sorted(name for name in {*self._holder} - {*expected} - spare if not name.endswith(DERIVED))
        faults.extend(f"{name} is no weight of such a model" for name in left)
        if faults:
            more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
            raise SpecError(Fault(path=str(self.folder), message=text) for text in [*faults[:_SHOWN], *more])


def write(
    folder: Path,
    config: ModelConfig,
    read: Read,
    *,
    dtype: str,
    shard_bytes: int,
    end: int | None = None,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    advance: Advance = lambda _: None,
) -> list[Path]:
    """Make `folder` an HF model; returns its files. It appears whole or not at all.

    `end` is the token that ends a document, if it is known; `beside` are further files, those of the tokenizer.
    Memory: one file's weights, so at most `shard_bytes`, or the largest weight where that is more.
    """
    must_be_free(folder)
    plain = to_hf(config, dtype=str(DTYPES[dtype]).removeprefix("torch."), end=end)
    save_file = _safetensors("torch").save_file
    draft = folder.with_name(f"{folder.name}.part")
    if draft.exists():
        shutil.rmtree(draft)  # of an export that was cut off
    draft.mkdir(parents=True)
    _write_json(draft / CONFIG, plain)
    if end is not None:
        _write_json(draft / GENERATION, {"eos_token_id": end})
    for name, content in beside.items():
        (draft / name).write_bytes(content)
        sync(draft / name)
    # As open as any new file here: safetensors makes its own for the owner alone.
    mode = (draft / CONFIG).stat().st_mode & 0o777
    shards = plan_shards(config, dtype=dtype, shard_bytes=shard_bytes)
    index: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors.update(_parts(name, read(name).to(DTYPES[dtype]), config))
        # transformers reads only files that say so.
        save_file(tensors, draft / file, metadata={"format": "pt"})
        (draft / file).chmod(mode)
        sync(draft / file)
        index.update(dict.fromkeys(tensors, file))
        size = sum(tensor.nbytes for tensor in tensors.values())
        total += size
        advance(size)
    if len(shards) > 1:
        _write_json(draft / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})
    draft.replace(folder)
    sync(folder.parent)
    return sorted(folder.iterdir())


def must_be_free(folder: Path) -> None:
    """Raise UsageError if the folder of an export is not empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists; choose another folder, or remove it")


def plan_shards(config: ModelConfig, *, dtype: str, shard_bytes: int) -> list[list[str]]:
    """Names of our weights per file, in the model's order; each file as large as allowed."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in weight_bytes(config, dtype=dtype).items():
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def weight_bytes(config: ModelConfig, *, dtype: str) -> dict[str, int]:
    """Size in bytes of every weight, by our names."""
    each = DTYPES[dtype].itemsize
    return {name: torch.Size(shape).numel() * each for name, shape in family.weight_shapes(config).items()}


def _parts(name: str, whole: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    names = family.of(config).hf_names(name, config)
    if len(names) == 1:
        return {names[0]: whole.contiguous()}
    # Copies: safetensors refuses tensors that share memory.
    return {theirs: part.clone() for theirs, part in zip(names, whole.chunk(len(names)), strict=True)}


def _files(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        placed = _json(folder / INDEX).get("weight_map")
        files = sorted({str(file) for file in placed.values()}) if isinstance(placed, dict) else []
        # Names from a file that came from anywhere: they may not lead out of the folder.
        if not files or any(Path(file).name != file for file in files):
            raise UsageError(f"{folder / INDEX}: its weight_map does not name files of this folder")
        return files
    if (folder / SINGLE).exists():
        return [SINGLE]
    raise UsageError(f"{folder}: neither {SINGLE} nor {INDEX} is there; weights in other formats are not read")


def _json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if not isinstance(plain, dict):
        raise UsageError(f"{path}: expected an object")
    return plain


def _write_json(path: Path, plain: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(plain, indent=2) + "\n")
    sync(path)


def _safetensors(part: str = "") -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as missing:
        raise MissingExtra("reading and writing HF weights", "hf") from missing
    return safetensors.torch if part else safetensors

"""`trainmaster export`: a checkpoint as an HF model, and an HF model as a checkpoint to start from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, is_new
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import MissingExtra, TrainmasterError, UsageError

if TYPE_CHECKING:
    from trainmaster.datasets.corpus.tokenizer import Tokenizer


class Dtype(StrEnum):
    """What each number is written as."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def export(
    source: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT|JOB", help="A checkpoint, a folder or a job: its newest one.")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    from_hf: Annotated[
        bool, typer.Option("--from-hf", help="The other way: CHECKPOINT is an HF model, OUT gets a checkpoint of it.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of the exported weights; fp32 is what training keeps.")] = Dtype.fp32,
    file_gib: Annotated[float, typer.Option(min=0.001, help="Largest file; also the memory it takes.")] = 4.0,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="bytes, a tokenizer.json or its folder, or hub:NAME. Not stated: the tokenizer of the run."),
    ] = None,
    end_token: Annotated[
        str | None, typer.Option(help="Token that ends a document. Not stated: that of the run or the tokenizer.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Make an HF model (weights, config, tokenizer) of a checkpoint, or with --from-hf a checkpoint of an HF model.

    The checkpoint is verified first, every byte; a damaged one is refused (exit code 1). The tokenizer is that of the
    run. Prepared data has its own, which a checkpoint does not name: give it with --tokenizer.

    [bold]Examples[/]

      trainmaster export checkpoints/step-00001000 my-model --dtype bf16

      trainmaster export checkpoints my-model --tokenizer Llama-3.2-1B/tokenizer.json

      trainmaster export 3f2a my-model --server https://trainmaster.example.org

      trainmaster export --from-hf Llama-3.2-1B start

      trainmaster train finetune.yaml init_from=start/step-00000000
    """
    for package, extra in (("torch", "train"), ("safetensors", "hf")):
        if find_spec(package) is None:
            raise MissingExtra("exchanging models with HF", extra)
    if from_hf:
        if not (source / "config.json").is_file():  # said before torch is imported
            how = f"download the model first: hf download ORGANISATION/{source.name} --local-dir {source}"
            raise UsageError(f"{source}: no Hugging Face model is in this folder (no config.json); {how}")
        done = _import(source, out)
    else:
        with _checkpoint(source, out, home, server) as folder:
            done = _export(folder, out, dtype.value, round(file_gib * 2**30), tokenizer, end_token)
    if as_json:
        _console.as_json(done)
    else:
        _console.out.out(done["path"])
        _console.note(f"{done['parameters']:,} parameters{' of step ' + str(done['step']) if 'step' in done else ''}")
        if done.get("tokenizer", "") is None:
            _console.note("no tokenizer: name the one you trained with by --tokenizer, or copy it beside the weights")
        if from_hf:
            _console.note(f"to train from it: init_from: {done['path']}")


@contextmanager
def _checkpoint(source: Path, out: Path, home: Path | None, server: str | None) -> Iterator[Path]:
    """The folder as it is; for a job a copy of its newest checkpoint, beside OUT while it is converted."""
    from trainmaster.cli._jobs import connect

    if len(source.parts) != 1 or source.name.startswith("step-") or any(source.glob("step-*")):
        yield source
        return
    # `fetch JOB` makes a folder with the name of the job, and no checkpoint in it.
    if source.exists() and not _names_job(str(source), home, server):
        yield source
        return
    from trainmaster.cli.jobs.fetch import fetch_checkpoint
    from trainmaster.models import hf

    hf.must_be_free(out)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-") as folder:
        with connect(home, server) as jobs:
            fetch_checkpoint(jobs, jobs.find(str(source)), Path(folder))
        yield Path(folder)


def _names_job(name: str, home: Path | None, server: str | None) -> bool:
    """Whether there is just one job of this name. No home is made for the question."""
    from trainmaster.cli._jobs import connect

    if not server and is_new(home):
        return False
    try:
        with connect(home, server) as jobs:
            jobs.find(name)
    except (TrainmasterError, OSError):
        return False
    return True


def _export(
    source: Path, out: Path, dtype: str, shard_bytes: int, name: str | None, end_token: str | None
) -> dict[str, Any]:
    from trainmaster.datasets.corpus.hf_tokenizer import files_of
    from trainmaster.models import hf
    from trainmaster.models.hf_config import model_type
    from trainmaster.train.checkpoint import weights

    hf.must_be_free(out)  # said now, not after an hour of verifying
    path, manifest = weights.find_checkpoint(source)
    tokenizer = _tokenizer(manifest.run, name, end_token)
    with _console.byte_bar("verifying", manifest.size_bytes) as advance:
        held = weights.Weights(path, manifest, advance=advance)
    sizes = hf.weight_bytes(held.config, dtype=dtype)
    with _console.byte_bar("writing", sum(sizes.values())) as advance:
        files = hf.write(
            out,
            held.config,
            held.read,
            dtype=dtype,
            shard_bytes=shard_bytes,
            end=None if tokenizer is None else tokenizer.end,
            beside={} if tokenizer is None else files_of(tokenizer),
            advance=advance,
        )
    return {
        "path": str(out),
        "family": model_type(held.config),
        "model": held.config.name,
        "parameters": sum(hf.weight_bytes(held.config, dtype="fp32").values()) // 4,
        "dtype": dtype,
        "step": manifest.step,
        "checkpoint": str(path),
        "tokenizer": None if tokenizer is None else tokenizer.name,
        "eos_token_id": None if tokenizer is None else tokenizer.end,
        "files": [file.name for file in files],
    }


def _tokenizer(run: Mapping[str, Any], name: str | None, end_token: str | None) -> Tokenizer | None:
    """The tokenizer that was asked for, else that of the run; None if the run's is not known or not here."""
    from trainmaster.datasets.corpus import tokenizer as tokenizers
    from trainmaster.datasets.corpus.hf_tokenizer import tokenizer_of

    known = tokenizer_of(run["data"]) if name is None and "data" in run else None
    if name is None and known is None:
        return None
    of_run, its_end = known or ("", None)
    try:
        tokenizer = tokenizers.load(name or of_run, end_token=end_token or its_end)
    except UsageError as error:
        if name is not None or end_token is not None:
            raise
        _console.note(str(error))
        return None
    most = run["model"]["vocab"]
    if tokenizer.vocab > most:
        raise UsageError(f"tokenizer {tokenizer.name}: its {tokenizer.vocab} tokens are more than the model's {most}")
    return tokenizer


def _import(source: Path, out: Path) -> dict[str, Any]:
    from trainmaster.models import hf
    from trainmaster.models.hf_config import model_type
    from trainmaster.train.checkpoint import weights

    with hf.HfFolder(source) as folder:
        size = sum(hf.weight_bytes(folder.config, dtype="fp32").values())
        with _console.byte_bar("writing", size) as advance:
            path = weights.save_weights(out, folder.config, folder.read, advance=advance)
    return {
        "path": str(path),
        "family": model_type(folder.config),
        "model": folder.config.name,
        "parameters": size // 4,
    }

"""`trainmaster data`: make a dataset ready to train on, and look whether one is."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.core.errors import UsageError
from trainmaster.documents import yaml_file

if TYPE_CHECKING:
    from trainmaster.datasets.corpus.index import Index
    from trainmaster.datasets.corpus.prepare import Recipe
    from trainmaster.datasets.corpus.validate import Report

_HUB = "hub:"


class TextUnit(StrEnum):
    """What of a plain text file is one document."""

    file = "file"
    paragraph = "paragraph"
    line = "line"


data = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Datasets: fetch, tokenise, shard (prepare) and check (validate).

    [bold]Examples[/]

      trainmaster data prepare corpus/*.jsonl.gz --out tokens --tokenizer tokenizer.json

      trainmaster data validate tokens --model llama.yaml
    """,
)

Tokenizer = Annotated[
    str, typer.Option(help="bytes, a tokenizer.json or its folder, or hub:NAME.", show_default="bytes")
]
EndToken = Annotated[str | None, typer.Option(help="Token that ends a document; else as the tokenizer says.")]
Field = Annotated[str, typer.Option("--field", help="Field or column that holds the text.")]
Unit = Annotated[TextUnit, typer.Option(help="Of plain text files: what is one document.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@data.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE…", help="Files, folders, globs, or one hub:NAME.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    tokenizer: Tokenizer = "bytes",
    end_token: EndToken = None,
    text_field: Field = "text",
    text_unit: Unit = TextUnit.file,
    held_out_share: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of documents kept for evaluations, chosen by their content.")
    ] = 0.005,
    processes: Annotated[
        int | None, typer.Option("--processes", "-n", min=1, help="Processes that tokenise; else one for each core.")
    ] = None,
    shard_mib: Annotated[int, typer.Option(min=1, help="Raw input that makes one shard.")] = 256,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out and count what cannot be read, instead of stopping.")
    ] = False,
    files: Annotated[str | None, typer.Option(help="hub: which files, as a glob over their paths.")] = None,
    subset: Annotated[str | None, typer.Option(help="hub: the subset whose files to take, such as en.")] = None,
    split: Annotated[str, typer.Option(help="hub: the split whose files to take.")] = "train",
    revision: Annotated[str, typer.Option(help="hub: branch, tag or commit.")] = "main",
    as_json: AsJson = False,
) -> None:
    """Tokenise documents into a folder that any number of ranks can train on.

    JSON lines, Parquet and plain text, also .gz; from the Hub files are downloaded first, into its own cache, and held
    to their checksums. A run that was cut off goes on with the same command: finished shards and files are kept.

    [bold]Examples[/]

      trainmaster data prepare corpus/ --out tokens

      trainmaster data prepare hub:allenai/c4 --files 'en/c4-train.0000*.json.gz' --out c4 --tokenizer hub:gpt2

      trainmaster train llama.yaml data.source=prepared data.path=c4
    """
    from trainmaster.datasets.corpus import prepare as _prepare

    recipe = _recipe(tokenizer, end_token, text_field, text_unit)
    recipe = replace(
        recipe, held_out_share=held_out_share, skip_unreadable=skip_unreadable, shard_bytes=shard_mib << 20
    )
    if len(sources) == 1 and sources[0].startswith(_HUB):
        paths, stamps, made_of = _from_hub(sources[0].removeprefix(_HUB), files, subset, split, revision)
    else:
        paths, stamps, made_of = _local(sources)
    size = sum(job.size_bytes for job in _prepare.plan(paths, recipe))
    with _console.byte_bar("tokenising", size) as advance:
        count = processes or len(os.sched_getaffinity(0))
        index = _prepare.prepare(paths, out, recipe, processes=count, source=made_of, stamps=stamps, advance=advance)
    done = _summary(out, index)
    if as_json:
        _console.as_json(done)
        return
    _console.out.out(str(out))
    shards = "shard" if done["shards"] == 1 else "shards"
    _console.note(
        f"{done['tokens']:,} tokens in {done['documents']:,} documents, {done['shards']} {shards} ({index.dtype}); "
        f"{done['held_out_tokens']:,} tokens held out; {done['empty']:,} empty and {done['skipped']:,} unreadable "
        "documents left out"
    )
    if not done["held_out_tokens"]:
        _console.note("nothing is held out: train with eval_sequences: 0, or prepare again with --held-out-share 0.05")
    _console.note(
        f"to train on it: data: {{source: prepared, path: {out}}} with model.vocab {index.tokenizer.vocab} or more"
    )


@data.command()
def validate(
    sources: Annotated[list[str], typer.Argument(metavar="PATH…", help="A prepared folder; or files, folders, globs.")],
    model: Annotated[
        Path | None, typer.Option(help="Training config: is its vocabulary large enough, its sequence filled?")
    ] = None,
    tokenizer: Tokenizer = "bytes",
    end_token: EndToken = None,
    text_field: Field = "text",
    text_unit: Unit = TextUnit.file,
    samples: Annotated[int, typer.Option(min=0, help="Documents to show as text.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Read all of a dataset and say what is in it: counts, lengths, vocabulary, copies, damage, some of its text.

    Exit code 1 if anything is damaged, each place named. Nothing is written.

    [bold]Examples[/]

      trainmaster data validate tokens --model llama.yaml

      trainmaster data validate corpus/*.jsonl --tokenizer tokenizer.json --json
    """
    from trainmaster.datasets.corpus import validate as _validate

    vocab = _model_vocab(model) if model is not None else None
    place = Path(sources[0]).expanduser()
    if len(sources) == 1 and _validate.is_prepared(place):
        size = sum(path.stat().st_size for path in place.glob("*.tokens"))
        with _console.byte_bar("reading", size) as advance:
            report = _validate.validate_prepared(place, model_vocab=vocab, samples=samples, advance=advance)
    else:
        paths, _, _ = _local(sources)
        recipe = _recipe(tokenizer, end_token, text_field, text_unit)
        with _console.byte_bar("reading", sum(path.stat().st_size for path in paths)) as advance:
            report = _validate.validate_files(paths, recipe, model_vocab=vocab, samples=samples, advance=advance)
    if as_json:
        _console.as_json({**asdict(report), "ok": report.ok})
    else:
        _show(report)
    raise typer.Exit(0 if report.ok else 1)


def _recipe(tokenizer: str, end_token: str | None, text_field: str, text_unit: TextUnit) -> Recipe:
    from trainmaster.datasets.corpus.files import TextLocation
    from trainmaster.datasets.corpus.prepare import Recipe

    manner = TextLocation(text_field=text_field, text_unit=text_unit.value)
    return Recipe(tokenizer=tokenizer, end_token=end_token, manner=manner)


def _local(sources: list[str]) -> tuple[list[Path], list[str], dict[str, Any]]:
    from trainmaster.datasets.corpus import files as _files

    if any(source.startswith(_HUB) for source in sources):
        raise UsageError("hub:NAME stands alone; prepare each dataset into its own folder and mix them when training")
    paths = [path for source in sources for path in _files.find(source)]
    stamps = [f"{path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
    return paths, stamps, {"files": [{"name": str(path), "size_bytes": path.stat().st_size} for path in paths]}


def _from_hub(
    name: str, pattern: str | None, subset: str | None, split: str, revision: str
) -> tuple[list[Path], list[str], dict[str, Any]]:
    from trainmaster.datasets.corpus import hub_files

    listing = hub_files.listing(name, revision, pattern=pattern, subset=subset, split=split)
    with _console.byte_bar("downloading", sum(file.size_bytes for file in listing.files)) as advance:
        paths = hub_files.fetch(listing, advance)
    stamps = [str(file.sha256 or file.git_sha1) for file in listing.files]
    files = [{"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in listing.files]
    return paths, stamps, {"hub": name, "commit": listing.commit, "files": files}


def _model_vocab(path: Path) -> int:
    from trainmaster.core.config.train import TrainConfig
    from trainmaster.core.schema import build

    def read(value: Any) -> int:
        config = value.get("train", value) if isinstance(value, dict) else value
        return build(TrainConfig, config).model.vocab

    return yaml_file.load(path).read(read)


def _summary(out: Path, index: Index) -> dict[str, Any]:
    return {
        "path": str(out),
        "tokens": index.tokens("train"),
        "documents": index.documents("train"),
        "held_out_tokens": index.tokens("held_out"),
        "held_out_documents": index.documents("held_out"),
        "shards": len(index.train),
        "dtype": index.dtype,
        "tokenizer": index.tokenizer.name,
        "vocab": index.tokenizer.vocab,
        "empty": index.empty,
        "skipped": index.skipped,
        "fingerprint": index.fingerprint,
    }


def _show(report: Report) -> None:
    out = _console.out
    out.print(f"{report.documents:,} documents, {report.tokens:,} tokens ({report.kind}, tokenizer {report.tokenizer})")
    if report.held_out_documents:
        out.print(f"{report.held_out_documents:,} documents, {report.held_out_tokens:,} tokens held out")
    out.print(f"lengths from {report.shortest or 0:,} to {report.longest or 0:,} tokens")
    out.print(f"highest token {report.max_token}, vocabulary {report.vocab}")
    out.print(f"{report.empty:,} empty documents, {report.duplicates:,} copies of an earlier one")
    for sample in report.samples:
        where, text = _console.plain(sample["where"]), _console.plain(sample["text"])
        out.print(f"[dim]{where}, {sample['tokens']:,} tokens:[/] {text!s}")
    for text in report.damage:
        out.print(f"{_console.paint('fail')} {_console.plain(text)}", soft_wrap=True)
    if report.damaged > len(report.damage):
        out.print(f"{_console.paint('fail')} and {report.damaged - len(report.damage):,} more")
    out.print(_console.paint("PASS" if report.ok else "FAIL"))

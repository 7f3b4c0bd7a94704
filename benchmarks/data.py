"""How fast samples come: from prepared shards beside bare reading of a memory map, and what preparing them takes.

    PYTHONPATH=src python3 benchmarks/data.py                         # makes its own data in a temporary folder
    PYTHONPATH=src python3 benchmarks/data.py --path FOLDER           # reads a prepared folder
    PYTHONPATH=src python3 benchmarks/data.py --tokenizer tokenizer.json --megabytes 64

Reading is warm: the files are in the page cache, so what is measured is our code and not the disk. The bare reader
takes the same rows in the same shuffled order from one map, as int64 tensors, and does nothing else. All rates are per
second of CPU time, so that other work on the machine does not count: what one core of its own would give.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainmaster.core.config.data import DataConfig
from trainmaster.datasets import Shape
from trainmaster.datasets._shuffle import shuffled
from trainmaster.datasets.corpus import index as _index
from trainmaster.datasets.corpus.prepare import Recipe, prepare
from trainmaster.datasets.prepared import Prepared

_WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an".split()


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of reading and preparing data.")
    parser.add_argument("--path", type=Path, help="a prepared folder; not stated: one is made")
    parser.add_argument("--megabytes", type=int, default=64, help="of raw text to make")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--sequence-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found: dict[str, Any] = {}
        folder = options.path
        if folder is None:
            folder = Path(place) / "tokens"
            found.update(measure_preparing(Path(place), folder, options))
        found.update(measure_reading(folder, options.sequence_tokens, options.rounds))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:48} {value:>16,.2f}" if isinstance(value, float) else f"{name:48} {value:>16,}")


def measure_preparing(place: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One process, so that it is a rate per core."""
    raw = place / "raw.jsonl"
    with raw.open("w") as file:
        for line in made_up(options.megabytes << 20):
            file.write(line)
    recipe = Recipe(tokenizer=options.tokenizer, held_out_share=0.0, shard_bytes=16 << 20)
    started = time.process_time()
    index = prepare([raw], folder, recipe, processes=1, source={}, stamps=[])
    took = time.process_time() - started
    size = raw.stat().st_size
    return {
        "prepare, a core: MB/s of JSON lines": size / took / 1e6,
        "prepare, a core: tokens/s": index.tokens("train") / took,
    }


def measure_reading(folder: Path, sequence_tokens: int, rounds: int) -> dict[str, Any]:
    index = _index.read(folder)
    shape = Shape(sequence_tokens=sequence_tokens, batch_sequences=1)
    sources = {rows: Prepared(DataConfig(rows=rows), shape, folder, None) for rows in ("concat", "pack")}
    count = min(2000, len(sources["concat"]._train))
    bare = bare_reader(folder, index, sequence_tokens, len(sources["concat"]._train))
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):  # in turns, so that whatever else the machine does hits all alike
        for name, read in (
            ("bare memory map", bare),
            ("prepared, concat", lambda number: sources["concat"].row(number, held_out=False)),
            ("prepared, pack", lambda number: sources["pack"].row(number, held_out=False)),
        ):
            rates.setdefault(name, []).append(rate(read, count, sequence_tokens))
    median = {f"{name}: tokens/s": statistics.median(values) for name, values in rates.items()}
    concat, plain = (statistics.median(rates[name]) for name in ("prepared, concat", "bare memory map"))
    fill = sources["pack"]._train.fill
    return {"rows read": count, **median, "concat over bare": concat / plain, "pack: share of positions filled": fill}


def rate(read: Callable[[int], object], count: int, sequence_tokens: int) -> float:
    started = time.process_time()
    for number in range(count):
        read(number)
    return count * sequence_tokens / (time.process_time() - started)


def bare_reader(folder: Path, index: _index.Index, sequence_tokens: int, rows: int) -> Callable[[int], object]:
    """All shards as one map would be; each row is taken from the shard its first token is in."""
    dtype = torch.uint16 if index.dtype == "uint16" else torch.uint32
    maps = [
        torch.from_file(str(folder / shard.tokens_file.name), size=shard.tokens, dtype=dtype) for shard in index.train
    ]
    starts = [0]
    for shard in index.train:
        starts.append(starts[-1] + shard.tokens)
    order = [shuffled(place, rows, seed=0, turn=0) for place in range(min(2000, rows))]

    def read(number: int) -> object:
        first = order[number] * sequence_tokens
        which = next(place for place in range(len(maps)) if first < starts[place + 1])
        at = first - starts[which]
        row = maps[which][at : at + sequence_tokens + 1].to(torch.int64)
        return row[:-1], row[1:]

    return read


def made_up(size_bytes: int) -> Iterator[str]:
    rng, written = random.Random(0), 0
    while written < size_bytes:
        words = rng.choices(_WORDS, k=int(min(5000, rng.lognormvariate(5.5, 1.0))) + 1)
        line = json.dumps({"text": " ".join(f"{word}{rng.randrange(100)}" for word in words)}) + "\n"
        written += len(line)
        yield line


if __name__ == "__main__":
    main()

"""Ranks of acceptance runs in the fork server, with the environment of any launcher."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fork_server import Child, ForkServer

TINY = (
    "--model transformer --layers 1 --width 16 --heads 2 --sequence 8 --num-classes 11 --warmup-iterations 1 "
    "--batch-size 4 --min-throughput 0.01"
)
_OF_LAUNCHERS = re.compile(r"^(RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|PET_|SLURM_|OMPI_|PMI|SM_|TORCHELASTIC|NCCL_)")


def clean() -> dict[str, str]:
    """This environment without any launcher's variables."""
    return {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.match(name)}


def torchrun(world: int, port: int) -> list[dict[str, str]]:
    """torchrun's variables of every rank."""
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0, "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        | {"MASTER_ADDR": "127.0.0.1"}
        for rank in range(world)
    ]


def accept(
    programs: ForkServer, folder: Path, words: str, environments: Sequence[Mapping[str, str]]
) -> tuple[list[int], dict[str, Any], list[tuple[float, str]]]:
    """Run one process per environment; their exit codes, results.json, and the first one's progress with times."""
    out = folder / "results.json"
    reader, writer = os.pipe()
    errors = [(folder / f"rank-{number}.err").open("w+") for number in range(len(environments))]
    children: list[Child] = []
    for number, variables in enumerate(environments):
        err = writer if number == 0 else errors[number].fileno()
        given = ["--out", str(out), "--backend", "gloo", "--timeout", "60", *words.split()]
        env = {**clean(), **variables}
        children.append(programs.start("trainmaster.bench.accept", *given, env=env, cwd=folder, err=err))
    os.close(writer)
    lines: list[tuple[float, str]] = []
    with os.fdopen(reader) as progress:
        for line in progress:
            lines.append((time.monotonic(), line.strip()))
    codes = [child.wait(60) for child in children]
    texts = [lines[-3:], *((folder / f"rank-{number}.err").read_text()[-500:] for number in range(len(environments)))]
    for file in errors:
        file.close()
    assert out.exists(), (codes, texts)
    return codes, json.loads(out.read_text()), lines

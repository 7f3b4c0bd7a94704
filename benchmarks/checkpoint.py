"""What checkpoints cost: the stall of a save, tokens/s with and without them, and bandwidth beside dd and cp.

    PYTHONPATH=src python3 benchmarks/checkpoint.py                  llama3.2-1b on a GPU: 4 minutes, 45 GB of disk
    PYTHONPATH=src python3 benchmarks/checkpoint.py --master bf16    half the bytes
    PYTHONPATH=src python3 benchmarks/checkpoint.py --device cpu     a tiny model: tries the script

Three runs of `python -m trainmaster.train`, each a process of its own as a job would have it:
  A  no saves until its last step. Its speed is what B is compared with; its last save has the disk to itself.
  B  the same run with a save every 20 steps. Its speed is taken from the boundary of step 20 to that of step 60:
     two saves begin within it, and are written.
  C  resumes from B's last checkpoint, none of which is in the page cache: every byte is read, hashed and put in place.
Then the same bytes on the same disk by dd (zeros written, files read one after another) and cp. A batch is 65,536
tokens in micro-batches of 4 × 4,096. A GB is 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

EVERY = 20
WARM = 5  # steps of A that are not counted: compile, first allocations, clocks
LIMIT = 0.03  # the share of tokens/s that saves may cost
Event = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", default="llama3.2-1b", help="on a GPU")
    parser.add_argument("--master", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; not stated: one of its own in the working folder"
    )
    parser.add_argument("--cost-only", action="store_true", help="runs A and B alone, without the bandwidths")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=options.folder or Path.cwd()))
    try:
        measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> None:
    base = shape(options)
    tokens = base["batch_tokens"]
    plain = train(base, folder / "a", steps=EVERY + WARM, every=10**9)
    without = speed(plain, first=WARM, last=EVERY + WARM - 1, tokens=tokens)
    (alone,) = named(plain, "CHECKPOINT", "saved")
    shutil.rmtree(folder / "a")
    saving = train(base, folder / "b", steps=3 * EVERY, every=EVERY)
    during = speed(saving, first=EVERY, last=3 * EVERY, tokens=tokens)
    saves = named(saving, "CHECKPOINT", "saved")
    if not options.cost_only:
        checkpoint = folder / "b" / "checkpoints" / f"step-{3 * EVERY:08d}"
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
        drop_from_cache(checkpoint)
        resumed = train(base, folder / "b", steps=3 * EVERY, every=EVERY)
        (loaded,) = named(resumed, "CHECKPOINT", "loaded")
        disk = measure_disk(checkpoint, folder / "copy", size)
        print_table(size, alone, saves, loaded, disk)
    cost = 1 - during / without
    stalls = ", ".join(f"{save['data']['stall_s'] * 1000:.0f} ms" for save in saves[:-1])
    steps = ", ".join(str(save["data"]["step"]) for save in saves)
    print(f"\nsaves begun at steps {steps}; training held by those in the background: {stalls}")
    print(f"tokens/s without saves {without:,.0f}, with one every {EVERY} steps {during:,.0f}")
    print(f"cost of the saves: {cost:.2%} of tokens/s (limit {LIMIT:.0%})")


def shape(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == "cpu":
        return {"device": "cpu", "batch_tokens": 1024, "sequence_tokens": 64}
    return {
        "model": {"preset": options.preset},
        "device": "cuda",
        "master": options.master,
        "batch_tokens": 65536,
        "sequence_tokens": 4096,
        "micro_sequences": 4,
    }


def train(base: Mapping[str, Any], folder: Path, *, steps: int, every: int) -> list[Event]:
    """One run to its end; its events."""
    folder.mkdir(exist_ok=True)
    config = {
        **base,
        "steps": steps,
        "epoch_steps": 10**9,
        "eval_sequences": 0,
        "checkpoint": {"folder": str(folder / "checkpoints"), "every_steps": every, "keep": 1},
    }
    (folder / "config.json").write_text(json.dumps(config))
    events, log = folder / "events.jsonl", folder / "log"
    events.unlink(missing_ok=True)
    started = time.perf_counter()
    with log.open("wb") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "trainmaster.train", str(folder / "config.json")],
            env={**os.environ, "TRAINMASTER_EVENTS": str(events)},
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode != 0:
        raise SystemExit(f"{log.read_text()[-4000:]}\nthe run failed with exit code {ended.returncode}")
    print(f"run of {steps} steps, a save every {every}: {time.perf_counter() - started:.0f} s", flush=True)
    for line in log.read_text().splitlines():
        if "saves take longer" in line:
            print(line)
    return [json.loads(line) for line in events.read_text().splitlines()]


def named(events: list[Event], phase: str, event: str) -> list[Event]:
    return [one for one in events if (one["phase"], one["event"]) == (phase, event)]


def speed(events: list[Event], *, first: int, last: int, tokens: int) -> float:
    """Tokens per second of wall time from the end of one step to the end of another."""
    ended = {one["data"]["step"]: datetime.fromisoformat(one["ts"]) for one in named(events, "STEP", "metrics")}
    return (last - first) * tokens / (ended[last] - ended[first]).total_seconds()


def measure_disk(checkpoint: Path, copy: Path, size: int) -> dict[str, float]:
    """Seconds that dd and cp need for the same bytes."""
    found: dict[str, float] = {}
    blocks = max(1, size >> 24)
    copy.mkdir()
    found["dd write"] = clock("dd", "if=/dev/zero", f"of={copy / 'zeros'}", "bs=16M", f"count={blocks}", "conv=fsync")
    (copy / "zeros").unlink()
    files = sorted(str(path) for path in checkpoint.iterdir())
    drop_from_cache(checkpoint)
    found["dd read"] = sum(clock("dd", f"if={name}", "of=/dev/null", "bs=16M") for name in files)
    # Its source is in the page cache now, as a save's is in memory; sync makes it last, as fsync does a save.
    found["cp"] = clock("sh", "-c", 'cp "$@" && sync "$0"/*', str(copy), *files, str(copy))
    shutil.rmtree(copy)
    return found


def clock(*argv: str) -> float:
    started = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return time.perf_counter() - started


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def print_table(size: int, alone: Event, saves: list[Event], loaded: Event, disk: Mapping[str, float]) -> None:
    behind = [save["data"]["seconds"] for save in saves[:-1]]
    rows = [
        ("save, nothing else going on", alone["data"]["seconds"], disk["cp"], "cp"),
        ("save, training going on", sum(behind) / len(behind), disk["cp"], "cp"),
        ("load and verify, cold", loaded["data"]["seconds"], disk["dd read"], "dd read"),
        ("dd write of zeros, fsync", disk["dd write"], disk["cp"], "cp"),
        ("cp, sync", disk["cp"], disk["cp"], "cp"),
        ("dd read, cold", disk["dd read"], disk["dd read"], "dd read"),
    ]
    print(f"\ncheckpoint of {size / 1e9:.2f} GB\n{'':32}{'seconds':>10}{'GB/s':>10}{'speed':>18}")
    for name, seconds, beside, what in rows:
        print(f"{name:32}{seconds:>10.2f}{size / 1e9 / seconds:>10.2f}{beside / seconds:>9.2f}x {what}")


if __name__ == "__main__":
    sys.exit(main())

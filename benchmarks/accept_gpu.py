"""Acceptance training beside plain loops over torchvision's models, on one GPU in one run.

    PYTHONPATH=src python3 benchmarks/accept_gpu.py
    PYTHONPATH=src python3 benchmarks/accept_gpu.py --stopwatch

The loops are what people write by hand: SGD with momentum and one batch that stays on the GPU, in float32, in bf16 with
channels-last, and for the large batch compiled as well. Ours is `trainmaster accept`, in a process of its own.

--stopwatch compares the throughput in results.json with the clock of this process, which reads the progress lines of
the run, and with samples counted from the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

# model, batch, steps, loops, and how many times as fast ours is meant to be
CASES = (
    ("resnet50", 64, 40, {"fp32 eager": 2.7, "bf16 eager": 1.6}),
    ("resnet18", 128, 60, {"fp32 eager": 3.0, "bf16 eager": 1.3}),
    ("resnet50", 256, 15, {"bf16 compiled": 1.0}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, action="append", help="number of a case, from 0; may be repeated")
    parser.add_argument("--stopwatch", action="store_true", help="compare the throughput with a clock outside the run")
    given = parser.parse_args()
    if given.stopwatch:
        return _stopwatch()
    chosen = given.case or range(len(CASES))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'model':<10}{'batch':>6}  {'side':<16}{'img/s':>10}{'ratio':>8}  wanted")
    missed = 0
    for model, batch, steps, loops in (CASES[number] for number in chosen):
        speeds = {name: _loop(model, batch, steps, name) for name in loops}
        ours, overall = _ours(model, batch)
        for name, wanted in loops.items():
            ratio = ours / speeds[name]
            missed += ratio < wanted
            print(f"{model:<10}{batch:>6}  {name:<16}{speeds[name]:>10,.0f}{ratio:>7.2f}x  {wanted}", flush=True)
        print(f"{model:<10}{batch:>6}  {'accept':<16}{ours:>10,.0f}           {overall}", flush=True)
    return 1 if missed else 0


def _stopwatch() -> int:
    """Throughput by the run's own clock and by ours; 1 where they differ by more than 1 %."""
    wrong = 0
    print(f"{'model':<12}{'batch':>6}{'accept':>12}{'stopwatch':>12}{'ratio':>9}")
    for model, batch in (("resnet50", 64), ("resnet18", 128), ("transformer", 32)):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "results.json"
            words = ["--model", model, "--batch-size", str(batch), "--duration", "10", "--out", str(out)]
            # One rank of a launcher writes its progress itself, without the launcher's delay.
            env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            times: dict[str, float] = {}
            with subprocess.Popen(
                [sys.executable, "-m", "trainmaster.bench.accept", *words],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env,
            ) as ran:  # fmt: skip
                for line in ran.stderr or ():
                    times[line.strip()] = time.perf_counter()
            ours = json.loads(out.read_text())["throughput_samples_per_second"]
        steps = next(int(text.split("/")[1]) for text in times if text.startswith("active "))
        outside = batch * steps / (times["timed steps: end"] - times["timed steps: begin"])
        wrong += abs(ours / outside - 1) > 0.01
        print(f"{model:<12}{batch:>6}{ours:>12,.1f}{outside:>12,.1f}{ours / outside:>9.4f}", flush=True)
    return 1 if wrong else 0


def _loop(name: str, batch: int, steps: int, how: str) -> float:
    """Images per second of a plain loop."""
    import torchvision

    torch.backends.cudnn.benchmark = True
    bf16 = how.startswith("bf16")
    layout = torch.channels_last if bf16 else torch.contiguous_format
    model = getattr(torchvision.models, name)().cuda().to(memory_format=layout)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=layout)
    labels = torch.randint(1000, (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    forward = torch.compile(model) if how.endswith("compiled") else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()

    for _ in range(8):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    found = batch * steps / (time.perf_counter() - begun)
    torch.cuda.empty_cache()
    return found


def _ours(model: str, batch: int) -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        words = ["--model", model, "--batch-size", str(batch), "--out", str(out)]
        subprocess.run(
            [sys.executable, "-m", "trainmaster.bench.accept", *words],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        document = json.loads(out.read_text())
    notes = document["ranks"][0]["notes"]
    checks = ", ".join(
        f"{one['check'].removeprefix('accept_')} {one['findings'][0]['verdict']}" for one in document["checks"]
    )
    return document["throughput_samples_per_second"], f"{document['overall']}: {checks}; {notes or 'compiled, graph'}"


if __name__ == "__main__":
    sys.exit(main())

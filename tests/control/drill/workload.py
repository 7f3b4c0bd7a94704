"""A training of 3 iterations with 5 epochs each, told in the words of seed 004. Every value in it is always the same.

Each epoch waits for its gate, a file, so that whoever drives the test decides how far it has come.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ITERATIONS, EPOCHS = 3, 5

PROGRAM = f"""
import json, os, time
from pathlib import Path
gates, outputs = Path(os.environ["TRAINMASTER_CHECKPOINTS"]), Path(os.environ["TRAINMASTER_OUTPUTS"])
out = os.open(os.environ["TRAINMASTER_EVENTS"], os.O_WRONLY | os.O_APPEND)
told = 0
def tell(phase, event, **more):
    global told
    told += 1
    ts = "2025-11-04 10:%02d:%02d" % divmod(told, 60)
    os.write(out, (json.dumps(dict(more, ts=ts, phase=phase, event=event)) + "\\n").encode())
tell("GROUP_ITERATION", "start", data=dict(config=dict(iterations={ITERATIONS}, epochs={EPOCHS})))
for i in range(1, {ITERATIONS} + 1):
    tell("ITERATION", "start", iteration=i, data=dict(lr=0.1 / i))
    tell("TRAJECTORY", "start", iteration=i)
    tell("TRAJECTORY", "end", iteration=i, data=dict(duration=2.5))
    tell("TRAINING", "start", iteration=i)
    for e in range(1, {EPOCHS} + 1):
        while not (gates / ("go-%d-%d" % (i, e))).exists():
            time.sleep(0.005)
        tell("TRAINING", "epoch_complete", iteration=i, epoch=e,
             data=dict(avg_loss=1 / (i + e), model_path="m/%d/%d" % (i, e), optimizer_path="o/%d/%d" % (i, e), n=e))
    tell("TRAINING", "end", iteration=i, data=dict(duration=60.0))
    tell("EVAL_TRAINING", "start", iteration=i)
    tell("EVAL_MODEL", "metrics", iteration=i, data=dict(model_id="m%d" % i, metrics=dict(accuracy=0.5 + i / 10)))
    tell("EVAL_TRAINING", "end", iteration=i, data=dict(duration=1.5))
    tell("ITERATION", "end", iteration=i, data=dict(time_taken=70.0))
    outputs.joinpath("model-%d" % i).mkdir()
    outputs.joinpath("model-%d" % i, "weights.bin").write_bytes(bytes([i]) * 100_000)
print("done", flush=True)
"""


def spec(**more: Any) -> dict[str, Any]:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    return {"name": "three-by-five", "command": command, "preflight": {"level": 0}, **more}


def gate(home: Path, job_id: str, number: int) -> None:
    """Let epoch `number` of the whole run, counted from 0, be told."""
    folder = home / "jobs" / job_id / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"go-{number // EPOCHS + 1}-{number % EPOCHS + 1}").touch()

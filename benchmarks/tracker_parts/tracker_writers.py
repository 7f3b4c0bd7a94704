"""The same runs, written to one tracker in the way that its documentation recommends. Started by trackers.py.

    python tracker_writers.py mlflow|aim|tensorboard|trainmaster FOLDER RUNS POINTS

Each product is written by the Python of its own environment, so that only its package is imported. Prints one line of
JSON: the seconds, those of the CPU, and the ids of the runs in order.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START = 1_770_000_000.0  # seconds since 1970 of the first point; a step takes 0.2 s


def losses(run: int, points: int) -> Iterator[tuple[int, float, float]]:
    """Step, time and loss of each point of a run."""
    noise = random.Random(run)
    for step in range(1, points + 1):
        yield step, START + 0.2 * step, 1.8 + 4 * math.exp(-step / (points / 9)) + noise.gauss(0, 0.05) + run / 1000


def write_mlflow(folder: Path, runs: int, points: int) -> Any:
    """In batches of 1,000, the most that its API takes at once, into SQLite, its default."""
    from mlflow import MlflowClient  # type: ignore[import-not-found]
    from mlflow.entities import Metric  # type: ignore[import-not-found]

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("bench", artifact_location=str(folder / "artifacts"))
    ids = []
    for run in range(runs):
        made = client.create_run(experiment, run_name=f"run-{run}").info.run_id
        rows = [Metric("loss", loss, int(1000 * at), step) for step, at, loss in losses(run, points)]
        for first in range(0, points, 1000):
            client.log_batch(made, metrics=rows[first : first + 1000])
        client.set_terminated(made)
        ids.append(made)
    return {"experiment": experiment, "ids": ids}


def write_aim(folder: Path, runs: int, points: int) -> Any:
    """By `track`, without what it records of the machine beside it."""
    import aim  # type: ignore[import-not-found]

    ids = []
    for number in range(runs):
        run = aim.Run(
            repo=str(folder), experiment="bench", system_tracking_interval=None, log_system_params=False,
            capture_terminal_logs=False,
        )  # fmt: skip
        run.name, run["number"] = f"run-{number}", number
        for step, _, loss in losses(number, points):
            run.track(loss, name="loss", step=step)
        ids.append(run.hash)
        run.close()
    return {"ids": ids}


def write_tensorboard(folder: Path, runs: int, points: int) -> Any:
    """As `torch.utils.tensorboard.SummaryWriter.add_scalar` does, through the writer that it uses."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-not-found]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-not-found]

    for run in range(runs):
        writer = EventFileWriter(str(folder / f"run-{run}"))
        for step, at, loss in losses(run, points):
            summary = Summary(value=[Summary.Value(tag="loss", simple_value=loss)])
            writer.add_event(Event(wall_time=at, step=step, summary=summary))
        writer.close()
    return {"ids": [f"run-{run}" for run in range(runs)]}


def write_trainmaster(folder: Path, runs: int, points: int) -> Any:
    """As the control plane takes in what a run tells: lines of events, by offset."""
    from datetime import UTC, datetime

    from pages import samples
    from trainmaster.core.events import Event
    from trainmaster.core.states import Stage, Status
    from trainmaster.store.migrate import open_database

    db, ids = open_database(folder / "trainmaster.db"), []
    for run in range(runs):
        spec = samples.spec(name=f"run-{run}", train={"steps": points})
        story = samples.Story(db, spec, at=datetime.fromtimestamp(START, UTC)).start().move(Stage.RUNNING)
        story.tell(
            Event(phase="STEP", event="metrics", ts=datetime.fromtimestamp(at, UTC), data={"step": step, "loss": loss})
            for step, at, loss in losses(run, points)
        )
        story.end_attempt().finish(Status.COMPLETED)
        ids.append(story.id)
    db.close()
    return {"ids": ids}


def main() -> None:
    product, folder, runs, points = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    began = time.monotonic()
    written = globals()[f"write_{product}"](folder, runs, points)
    took_s, cpu_s = round(time.monotonic() - began, 1), round(time.process_time(), 1)
    print(json.dumps({"write_s": took_s, "write_cpu_s": cpu_s, **written}))


if __name__ == "__main__":
    main()

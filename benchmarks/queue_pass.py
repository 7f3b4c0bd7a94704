"""One pass of our own queue: 10,000 waiting jobs, 1,000 GPUs of which half are held.

python benchmarks/queue_pass.py [--jobs 10000] [--machines 125]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from trainmaster.queueing.schedule import schedule
from trainmaster.queueing.state import Machine, Need, Running, Share, State, Waiting


def make_state(rng: random.Random, *, jobs: int, machines: int) -> State:
    """Jobs of 1 to 64 GPUs of twenty projects, some with quotas; half of the machines run something."""
    held = tuple(Machine(name=f"m{m}", gpus=tuple(f"GPU-{m}-{k}" for k in range(8))) for m in range(machines))
    running = tuple(
        Running(
            job=f"r{m}", project=f"p{m % 20}", priority=m % 3, kind="gpu", devices={f"m{m}": held[m].gpus[:6]},
            since_s=-3600.0, end_s=rng.uniform(0, 7200) if m % 3 else None, preemptible=m % 2 == 0, loss=float(m),
        )
        for m in range(0, machines, 2)
    )  # fmt: skip
    shapes = [Need(nodes=n, each=k, kind="gpu") for n, k in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (8, 8))]
    waiting = tuple(
        Waiting(
            job=f"j{n}", project=f"p{rng.randrange(20)}", priority=rng.randrange(4), need=rng.choice(shapes),
            since_s=-rng.uniform(0, 200_000), longest_s=rng.choice((None, 600.0, 7200.0)),
        )
        for n in range(jobs)
    )  # fmt: skip
    shares = {f"p{n}": Share(quota=100 if n % 4 == 0 else None, weight=1.0 + n % 3) for n in range(20)}
    return State(now_s=0.0, machines=held, running=running, waiting=waiting, shares=shares)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--machines", type=int, default=125)
    chosen = options.parse_args()
    state = make_state(random.Random(7), jobs=chosen.jobs, machines=chosen.machines)
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        decided = schedule(state)
        times.append(time.perf_counter() - begin)
    gpus = 8 * chosen.machines
    print(f"{chosen.jobs} jobs, {gpus} GPUs: {len(decided.starts)} starts, {len(decided.preempts)} preemptions")
    print(f"one pass: median {statistics.median(times):.3f} s, slowest {max(times):.3f} s")


if __name__ == "__main__":
    main()

"""How fast data comes into a GPU and out of it: pinned copies each way and both at once, with its peers and alone.

Alone is what a link can do, and what a published figure says. Together shows what GPUs behind one switch share: it
depends on how the server is built, so it is told and not judged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainmaster.bench.probe._run import Run, wait
from trainmaster.bench.probe._timing import ROUNDS, rates

DEADLINE_S = 110.0  # among them the turns of seven others
BYTES = 256 << 20
TOGETHER_S = 1.0
ALONE_S = 0.15  # of one direction in one round
TURN_S = 20.0  # a GPU that hangs in its turn is given up then, or the others would wait for it


def measure(run: Run) -> None:
    run.step("moving to the CPUs next to the GPU")
    run.results["cpus"] = _move_near(run.device)
    run.step("pinned allocation")
    size = BYTES if run.on_gpu else 1 << 20
    sent = torch.randint(0, 256, (size,), dtype=torch.uint8, pin_memory=run.on_gpu)
    back = torch.zeros(size, dtype=torch.uint8, pin_memory=run.on_gpu)
    there = torch.zeros(size, dtype=torch.uint8, device=run.device)
    away = torch.zeros(size, dtype=torch.uint8, device=run.device)
    run.results["buffer_bytes"] = size
    copies = _copies(run, sent, back, there, away)
    for work in copies.values():  # the first copy maps the buffers
        work()
        wait(run.device)
    budget_s = 1.0 if run.on_gpu else 0.02
    run.step("waiting to copy together with the other GPUs")
    with turn("pcie", alone=False), run.within(TURN_S):
        run.step("copying together with the other GPUs")
        began = time.time()
        seconds = {name: _repeat(run, work, TOGETHER_S * budget_s / 3) for name, work in copies.items()}
        run.results["together"] = {
            **{name: round(_bytes(name, size) / 1e9 * len(each) / sum(each), 2) for name, each in seconds.items()},
            "began": round(began, 3),
            "ended": round(time.time(), 3),
        }
    run.step("waiting for its turn to copy alone")
    with turn("pcie", alone=True), run.within(TURN_S):
        run.step("copying alone")
        rounds: dict[str, list[list[float]]] = {name: [] for name in copies}
        for _ in range(ROUNDS):
            for name, work in copies.items():
                rounds[name].append(_repeat(run, work, ALONE_S * budget_s))
    for name, each in rounds.items():
        run.results[name] = rates(each, _bytes(name, size) / 1e9)
    run.step("comparing")
    there.copy_(sent)
    back.zero_()
    back.copy_(there)
    run.results["wrong"] = int((back != sent).sum().item())


def _copies(
    run: Run, sent: torch.Tensor, back: torch.Tensor, there: torch.Tensor, away: torch.Tensor
) -> dict[str, Callable[[], None]]:
    def h2d() -> None:
        there.copy_(sent, non_blocking=True)

    def d2h() -> None:
        back.copy_(away, non_blocking=True)

    def one_after_the_other() -> None:
        h2d()
        d2h()

    if not run.on_gpu:
        return {"h2d": h2d, "d2h": d2h, "both": one_after_the_other}
    into, out_of = (torch.cuda.Stream(run.device) for _ in range(2))  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(into):
            h2d()
        with torch.cuda.stream(out_of):
            d2h()

    return {"h2d": h2d, "d2h": d2h, "both": both}


def _bytes(direction: str, size: int) -> int:
    return 2 * size if direction == "both" else size


def _repeat(run: Run, work: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each copy, waited for with the host's clock: two streams have no common event, and 5 ms are long."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < until:
        started = time.perf_counter()
        work()
        wait(run.device)
        times.append(time.perf_counter() - started)
    return times


def _move_near(device: torch.device) -> str | None:
    """Run on the CPUs of the GPU's own socket, whose memory is then pinned; over the other one copies are slower."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        text = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text().strip()
    except (AttributeError, OSError):
        return None  # measured from wherever it runs, and said so
    near = {
        cpu
        for part in re.findall(r"(\d+)(?:-(\d+))?", text)
        for cpu in range(int(part[0]), int(part[1] or part[0]) + 1)
    }
    allowed = near & os.sched_getaffinity(0)
    if not allowed:
        return None
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, allowed)
        return text
    return None


@contextlib.contextmanager
def turn(name: str, *, alone: bool) -> Iterator[None]:
    """Hold the machine's PCIe links, together with other probes or alone; wait for the turn.

    The probes of a node are processes of their own that start at once. A shared lock on one file lets them measure
    together, an exclusive one each alone. The kernel drops the lock of a process that dies, so a crashed probe holds
    nobody up.
    """
    path = Path(tempfile.gettempdir()) / f"trainmaster-{os.getuid()}-{name}.lock"
    # The folder is everybody's: a link that somebody else put there is not followed.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)

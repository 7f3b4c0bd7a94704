"""A rank that falls ill at a stated moment: the real one, with one method wrapped. Started by tests instead of it.

SICK="rank:what:collective:size" with what one of
  flip   one bit of what it received is wrong      raise  its collective fails
  sleep  it never enters                           stop, kill  it gets that signal inside
"""

from __future__ import annotations

import os
import signal
import time

from trainmaster.bench.collectives import rank
from trainmaster.bench.collectives.operations import Operation
from trainmaster.bench.collectives.pattern import Line, Ruler

WHO, WHAT, COLLECTIVE, SIZE = os.environ["SICK"].split(":")
healthy_run, healthy_draw = Operation.run, Ruler.draw


def is_time(name: str, size: int) -> bool:
    return os.environ["RANK"] == WHO and name == COLLECTIVE and size == int(SIZE)


def run(self: Operation) -> None:
    now = is_time(self.name, self.bytes)
    if now and WHAT == "raise":
        raise RuntimeError("the cable is out")
    if now and WHAT in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if WHAT == "stop" else signal.SIGKILL)
    healthy_run(self)
    if now and WHAT == "flip":
        self.result[1234] ^= 1 << 20


def draw(self: Ruler, buffer: object, line: Line) -> None:
    if WHAT == "sleep" and is_time(COLLECTIVE, line.count * 4):
        time.sleep(1000)
    healthy_draw(self, buffer, line)


Operation.run, Ruler.draw = run, draw
rank.main()

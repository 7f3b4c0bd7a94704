"""`queue:` of a spec at a target: which fields it has, what becomes of each there, and what is refused.

A target states in its traits what it makes of each field (`Traits.queue`). A field that it does not state is refused
with what it has instead, before there is a row; none is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from trainmaster.core.config.queue import PRIORITIES, Queue
from trainmaster.core.errors import Fault
from trainmaster.core.expect import show_value
from trainmaster.targets._traits import Traits

# Of targets whose jobs wait at the server: there is one queue, without a name.
OWN_QUEUE: Mapping[str, str] = {
    "priority": "place in the server's own queue",
    "preemptible": "the server stops it for a job of higher priority, and starts it again",
    "max_wait_s": "the server fails a job that waits longer",
}
NO_NAME: Mapping[str, str] = {"name": "its jobs wait in the server's one queue, which has no name"}
DRAIN_HERE = "use `trainmaster nodes drain NODE --reason TEXT`: the server's queue starts nothing new there"
# Of every other target: the time in its own queue, until the first start.
MAX_WAIT = "the server takes a job that waits longer out of the queue and fails it"


def describe_queue(traits: Traits, queue: Queue) -> list[str]:
    """A line for each stated field: what the target makes of it."""
    return [
        f"{name} {show_value(value)}: {traits.queue[name]}" for name, value in _stated(queue) if name in traits.queue
    ]


def find_queue_faults(target: str, traits: Traits, queue: Queue) -> Iterator[Fault]:
    """Fields of the block that the target has not; `target` is its name."""
    can = ", ".join(f"`{name}`" for name in traits.queue) or "nothing of it"
    for name, value in _stated(queue):
        if name not in traits.queue:
            why = traits.no_queue.get(name, "it has no such setting")
            yield Fault(path=f"queue.{name}", message=f"{target} cannot do this: {why}; of `queue:` it takes {can}")
        elif name == "priority" and traits.queue is OWN_QUEUE and value not in PRIORITIES:
            message = f"{value!r} is no priority of the server's queue; write one of {', '.join(PRIORITIES)}"
            yield Fault(path="queue.priority", message=message)


def _stated(queue: Queue) -> Iterator[tuple[str, object]]:
    default = Queue()
    for item in fields(queue):
        if (value := getattr(queue, item.name)) != getattr(default, item.name):
            yield item.name, value

"""`queue:` of a spec as options of sbatch. Pure.

name → --qos (the partition stays in `slurm:`); priority → what the cluster file states for the word, and --nice for
`low`, which every user may give; preemptible → --requeue. Slurm has no limit of the time in the queue: `--deadline`
bounds the end of a run. `max_wait_s` is kept by the control plane, which cancels a job that waits longer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from trainmaster.core.config.queue import Queue
from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.vendors.slurm import SlurmOptions

LOW_NICE = 10_000  # more than the weights that most sites give to age and size; sbatch's own default is 100
PRIORITY = re.compile(r"--(qos=[A-Za-z0-9_.-]{1,63}|nice=-?[0-9]{1,10}|priority=[0-9]{1,10})")


def apply_queue(options: SlurmOptions, queue: Queue, *, stated: SlurmOptions, words: Mapping[str, str]) -> SlurmOptions:
    """The options with those of the block; SpecError for what Slurm cannot do.

    `options` are over the cluster file's defaults, `stated` the spec's own, `words` the priorities of the cluster file.
    """
    faults: list[Fault] = []
    if queue.name is not None:
        if stated.qos not in (None, queue.name):
            faults.append(Fault(path="queue.name", message=f"slurm.qos states {stated.qos}; write one of both"))
        options = replace(options, qos=queue.name)
    if queue.preemptible:
        if stated.requeue is False:
            faults.append(
                Fault(path="queue.preemptible", message="slurm.requeue is false; a job that is preempted ends")
            )
        options = replace(options, requeue=True)
    if option := _find_priority(queue, words, faults):
        key, _, value = option.removeprefix("--").partition("=")
        if key != "qos":
            options = replace(options, options=(*options.options, option))
        elif (other := queue.name or stated.qos) not in (None, value):
            message = f"{queue.priority} is the QOS {value} here, and the QOS {other} is stated; write one of both"
            faults.append(Fault(path="queue.priority", message=message))
        else:
            options = replace(options, qos=value)
    if faults:
        raise SpecError(faults)
    return options


def _find_priority(queue: Queue, words: Mapping[str, str], faults: list[Fault]) -> str:
    """The option of sbatch for the priority; empty for `normal` where the cluster file states nothing."""
    if queue.priority in words:
        return words[queue.priority]
    if queue.priority == "normal":
        return ""
    if queue.priority == "low":
        return f"--nice={LOW_NICE}"
    known = ", ".join(dict.fromkeys(("low", "normal", *words)))
    message = (
        f"{queue.priority!r} is not stated in `priorities:` of the cluster file, and a user cannot raise a job "
        f"without it; write one of {known}, or a QOS of higher priority in queue.name"
    )
    faults.append(Fault(path="queue.priority", message=message))
    return ""

"""Catalogue of events: phase, event, writer, and every field with its type and meaning.

docs/reference/events.md is written from this table. Tests validate each event that the agent or the trainer emits
against it (`CHECK_VARIABLE`, node/emit.py). Workloads may emit other events and fields: both are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "number", "text", "bool", "list", "map"]
Writer = Literal["agent", "trainer", "workload"]

CHECK_VARIABLE = "TRAINMASTER_CHECK_EVENTS"  # set: an event that this table does not describe is an error


@dataclass(frozen=True, slots=True, kw_only=True)
class EventField:
    """One field of an event's `data`."""

    name: str
    kind: Kind
    doc: str
    nullable: bool = False
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EventType:
    """One event of one phase. `writers` emit it; a workload's may carry more fields than these, or fewer."""

    phase: str
    event: str
    writers: tuple[Writer, ...]
    doc: str
    fields: tuple[EventField, ...] = ()
    has_epoch: bool = False


def find(phase: str, event: str) -> EventType | None:
    """The catalogue's entry of an event, or None."""
    return _BY_NAME.get((phase, event))


def list_faults(phase: str, event: str, data: Mapping[str, Any], *, epoch: int | None = None) -> list[str]:
    """Differences between an event of ours and the catalogue."""
    entry = find(phase, event)
    if entry is None or entry.writers == ("workload",):
        return [f"{phase} {event}: not an event that the agent or the trainer emits; see core/event_catalog.py"]
    known = {field.name: field for field in entry.fields}
    faults = [f"{name}: unknown field" for name in data if name not in known]
    faults += [f"{field.name}: missing" for field in entry.fields if field.required and field.name not in data]
    faults += [
        f"{name}: {value!r} is not {known[name].kind}"
        for name, value in data.items()
        if name in known and not _is_of_kind(value, known[name])
    ]
    if (epoch is not None) != entry.has_epoch:
        faults.append("epoch: missing" if entry.has_epoch else "epoch: not a field of this event")
    return [f"{phase} {event}: {fault}" for fault in faults]


_TYPES: Mapping[Kind, tuple[type, ...]] = {
    "int": (int,),
    "number": (int, float),
    "text": (str,),
    "bool": (bool,),
    "list": (list, tuple),
    "map": (Mapping,),
}


def _is_of_kind(value: object, field: EventField) -> bool:
    if value is None:
        return field.nullable
    if isinstance(value, bool) and field.kind != "bool":
        return False
    return isinstance(value, _TYPES[field.kind])


def _fields(*rows: tuple[str, str, str]) -> tuple[EventField, ...]:
    """Fields from (name, kind, meaning). `name?` may be absent, `kind?` may be null."""
    return tuple(
        EventField(
            name=name.rstrip("?"),
            kind=kind.rstrip("?"),  # type: ignore[arg-type]  # a test compares every word with Kind
            doc=doc,
            nullable=kind.endswith("?"),
            required=not name.endswith("?"),
        )
        for name, kind, doc in rows
    )


def _entry(
    phase: str, event: str, writers: str, doc: str, *rows: tuple[str, str, str], has_epoch: bool = False
) -> EventType:
    words: Sequence[Any] = writers.split()
    return EventType(
        phase=phase, event=event, writers=tuple(words), doc=doc, fields=_fields(*rows), has_epoch=has_epoch
    )


_SAMPLES = (
    ("first_sample", "int", "number of the first sample concerned, counted over all ranks from 0"),
    ("last_sample", "int", "number of the last sample concerned"),
)
_TIER = ("tier", "text", "`memory`, `disk`, `remote` or `managed`")

CATALOG: tuple[EventType, ...] = (
    _entry(
        "PROJECT", "start", "agent workload", "The attempt has begun on this node.",
        ("attempt", "text", "unique name of the attempt"),
        ("host", "text", "host name of the node"),
        ("version", "text", "version of trainmaster on the node"),
    ),
    _entry(
        "PROJECT", "end", "agent workload", "The attempt is over on this node.",
        ("ok", "bool", "true if every rank ended with exit code 0"),
        ("reason", "text?", "typed reason of the failure (GLOSSARY: reason); null if ok"),
        ("message", "text", "one sentence: which rank, how it ended, its decisive line"),
        ("time_taken", "number", "seconds since the start"),
    ),
    _entry(
        "GROUP_ITERATION", "start", "workload", "A group of iterations begins.",
        ("config?", "map", "training configuration of the project"),
    ),
    _entry("ITERATION", "start", "workload", "An iteration begins; its number is the line's `iteration`."),
    _entry("ITERATION", "end", "workload", "An iteration is over.", ("time_taken?", "number", "seconds")),
    _entry("TRAJECTORY", "start", "workload", "Generation of trajectories begins."),
    _entry("TRAJECTORY", "end", "workload", "Generation of trajectories is over.", ("duration?", "number", "seconds")),
    _entry(
        "PREFLIGHT", "start", "agent", "Checks before the ranks start.",
        ("planned", "list", "names of the checks to run"),
    ),
    _entry(
        "PREFLIGHT", "check", "agent", "One check is done.",
        ("check", "text", "name of the check"),
        ("verdict", "text", "`pass`, `warn`, `fail`, `skip` or `error`"),
        ("took_s", "number", "seconds"),
        ("findings", "list", "one map per finding: verdict, reason, action, values"),
    ),
    _entry(
        "PREFLIGHT", "end", "agent", "All checks are done.",
        ("overall", "text", "`PASS`, `WARN`, `FAIL` or `INCOMPLETE`"),
    ),
    _entry(
        "HEARTBEAT", "alive", "agent", "The agent is alive; every 10 seconds.",
        ("ranks", "int", "ranks of this node that are running; 0 during the pre-flight"),
    ),
    _entry(
        "HEARTBEAT", "events_lost", "agent",
        "The event file was truncated, replaced or removed on the node: lines before this one may be missing.",
        ("after_seq", "int", "`seq` of the agent's last line before"),
        ("left_bytes", "int", "size of the file when this was seen"),
    ),
    _entry(
        "HEARTBEAT", "events_cut", "agent",
        "The event file had become too large for its disk and was emptied: lines before this one may be missing.",
        ("cut_bytes", "int", "size of the file when this was seen"),
    ),
    _entry(
        "START", "part", "trainer", "One part of the start of the ranks is done, on rank 0.",
        ("part", "text", "`fork`, `imports`, `device`, `rendezvous`, `build`, `load`, `compile` or `first_step`"),
        ("seconds", "number", "how long it took"),
        ("restart", "int", "times that the ranks were started before in this attempt"),
    ),
    _entry(
        "START", "done", "trainer", "The first step after a start of the ranks is done.",
        ("step", "int", "its number"),
        ("seconds", "number", "since the agent began to start the ranks; without an agent: since this process began"),
        ("parts", "map", "seconds of each part, in order"),
        ("restart", "int", "times that the ranks were started before in this attempt"),
    ),
    _entry(
        "RECOVERY", "start", "agent", "A rank or a node was lost, and all ranks are started again in this attempt.",
        ("how", "text", "`in_place`; `spare`: a spare node has taken the place of a lost one; `group`: only the ranks "
         "of one replica group are started again, and the others go on"),
        ("restart", "int", "number of this recovery in the attempt, from 1"),
        ("without_save", "int", "recoveries in a row, with this one, since the last checkpoint of the attempt"),
        ("rank", "int?", "rank that failed first"),
        ("reason", "text", "typed reason of its failure"),
        ("message", "text", "one sentence: which rank, how it ended, its decisive line"),
        ("replaced", "map", "number of each node that a spare replaces, with the spare's host name"),
    ),
    _entry(
        "RECOVERY", "refused", "agent", "The attempt ends although the cause may pass; a new attempt may follow.",
        ("reason", "text", "typed reason of the failure"),
        ("message", "text", "one sentence: which rank, how it ended, its decisive line"),
        ("why", "text", "why the ranks are not started again in this attempt"),
    ),
    _entry(
        "RECOVERY", "survived", "trainer", "The replica groups that are left have made a step without the lost one.",
        ("groups", "int", "groups that made it"),
        ("of", "int", "groups of the run"),
        ("step", "int", "number of that step"),
        ("seconds", "number", "since the agent saw the loss: the pause of these groups"),
        ("parts", "map", "seconds of each part: `seen` until the group had given up the step, `meet`, `copy` of a "
         "state that was newer elsewhere, and `step`, made again"),
    ),
    _entry(
        "RECOVERY", "done", "trainer", "The first step after a recovery is done.",
        ("how", "text", "`in_place`, `spare` or `group`"),
        ("restart", "int", "number of this recovery in the attempt, from 1"),
        ("step", "int", "number of that step"),
        ("resumed_from", "int?", "step of the checkpoint that was loaded; null: there was none"),
        ("tier", "text?", "where it was loaded from"),
        ("seconds", "number", "since the agent saw that a rank had died, or since a lost node was last heard"),
        ("parts", "map", "seconds of each part: of a lost node `silence`; `stop`, `check`, on several nodes `agree`, "
         "then those of the start"),
    ),
    _entry(
        "TRAINING", "start", "trainer workload", "Training begins or resumes.",
        ("steps", "int", "steps of the whole run"),
        ("parameters", "int", "parameters of the model"),
        ("ranks", "int", "ranks of the run"),
        ("device", "text", "`cpu` or `cuda`"),
        ("device_name", "text", "name of rank 0's device"),
        ("precision", "text", "`fp32` or `bf16`: what matrices are multiplied in"),
        ("batch_sequences", "int", "sequences per step, over all ranks"),
        ("sequence_tokens", "int", "tokens per sequence"),
        ("resumed_from", "int?", "step of the checkpoint that was loaded; null for a new run"),
        ("torch", "text", "version of torch"),
        ("data_source", "text", "`data.source` of the config"),
    ),
    _entry(
        "TRAINING", "epoch_complete", "trainer workload", "An epoch is over.",
        ("step", "int", "last step of the epoch"),
        ("avg_loss", "number?", "mean loss of the epoch's steps; null if every step was skipped"),
        ("model_path", "text?", "newest checkpoint of this run"),
        ("optimizer_path", "text?", "the same checkpoint: it holds the optimizer too"),
        ("tokens_per_s", "number", "mean over this run so far, evaluation and saving not counted"),
        has_epoch=True,
    ),
    _entry(
        "TRAINING", "end", "trainer workload", "The last step is done, or the run stopped on request.",
        ("step", "int", "steps done"),
        ("loss_first", "number?", "loss of the first step"),
        ("loss_last", "number?", "loss of the last step that was not skipped"),
        ("tokens_per_s", "number", "mean over this run"),
        ("duration", "number", "seconds since this process began to train"),
        ("stopped", "bool", "true if it stopped on request before its last step"),
    ),
    _entry("EVAL_TRAINING", "start", "trainer workload", "An evaluation begins.", ("step", "int", "steps done")),
    _entry(
        "EVAL_TRAINING", "end", "trainer workload", "An evaluation is over.",
        ("step", "int", "steps done"),
        ("duration", "number", "seconds"),
    ),
    _entry(
        "EVAL_MODEL", "metrics", "trainer workload",
        "Results of an evaluation. A workload's own carries `model_id` or `model_path`, and a map `metrics`.",
        ("step", "int", "steps done"),
        ("loss", "number", "mean loss per token over the held-out samples"),
        ("perplexity", "number", "exp(loss)"),
    ),
    _entry(
        "STEP", "metrics", "trainer workload", "Metrics of one step, and rates since the event before it.",
        ("step", "int", "number of the step, from 1"),
        ("loss", "number", "mean loss per counted token of the whole batch"),
        ("lr", "number", "learning rate of the step"),
        ("grad_norm", "number", "norm of the gradient before clipping"),
        ("tokens_per_s", "number", "tokens per second, all ranks"),
        ("tokens_per_s_per_gpu", "number", "tokens per second and rank"),
        ("samples_per_s", "number", "sequences per second, all ranks"),
        ("step_s", "number", "seconds per step"),
        ("mfu", "number?", "model FLOPs utilisation against the datasheet; null for an unknown device"),
        ("mfu_measured", "number?", "the same against the matrix product measured at the start; null on a CPU"),
        ("data_share", "number?", "share of the time spent waiting for samples"),
        ("compute_share", "number?", "share of the time spent computing; null where it cannot be measured"),
        ("comm_share", "number?", "share of the time spent waiting for other ranks; null likewise"),
        ("memory_gib", "number?", "peak of rank 0's GPU memory since the start; null on a CPU"),
        ("memory_allocated_gib?", "number", "allocated now"),
        ("memory_reserved_gib?", "number", "reserved by the allocator now"),
        ("read_from?", "text", "the command wrote no event: the agent read the figures from its log, tensorboard, …"),
    ),
    _entry(
        "CHECKPOINT", "saved", "trainer", "A checkpoint is committed in a tier.",
        ("step", "int", "step it holds"),
        ("path", "text", "folder or URL"),
        ("seconds", "number", "from the beginning of the save to its commit"),
        ("bytes", "int", "size over all ranks"),
        _TIER,
        ("stall_s", "number", "seconds for which training stood still"),
    ),
    _entry(
        "CHECKPOINT", "loaded", "trainer", "The run resumed from a checkpoint.",
        ("step", "int", "step it holds"),
        ("path", "text", "folder or URL"),
        ("seconds", "number", "seconds to verify and load it"),
        _TIER,
    ),
    _entry(
        "CHECKPOINT", "failed", "trainer", "A save failed; the checkpoint before it is untouched.",
        ("step", "int", "step that was to be saved"),
        ("why", "text", "cause"),
        _TIER,
    ),
    _entry(
        "CHECKPOINT", "rejected", "trainer", "A checkpoint was found and not used.",
        ("path", "text", "folder or URL"),
        ("why", "text", "damage, or why it could not be read"),
        _TIER,
    ),
    _entry(
        "CHECKPOINT", "bound", "trainer", "The most that the loss of a process, a node or all nodes can cost now.",
        ("lost_steps", "int?", "steps lost with a node, at most; null: everything, or not known while saves fail"),
        ("lost_s", "number?", "the same in seconds"),
        ("losses", "map", "for each kind of loss: tier, lost_steps, lost_s"),
        ("every_steps", "map", "save interval of each tier"),
        ("step_s", "number", "seconds per step that this is computed with"),
        ("limit_steps", "int?", "limit that the config asks for"),
        ("unmeasured", "list", "tiers that no save has reached yet"),
        ("missed", "text?", "why the limit is not held, and what would hold it"),
        ("withdrawn", "text?", "why what was stated before does not hold now: saves fail"),
    ),
    _entry(
        "WATCH", "skipped", "trainer", "A bad step: loss or gradient norm not finite, or a spike. No weight moved.",
        ("step", "int", "number of the step"),
        *_SAMPLES,
        ("loss", "number", "its loss"),
        ("grad_norm", "number", "its gradient norm"),
        ("why", "text", "which limit it broke"),
    ),
    _entry(
        "WATCH", "rollback", "trainer", "Too many bad steps in a row: back to a checkpoint, past these samples.",
        ("step", "int", "step that the run was at"),
        ("to_step", "int", "step that it continues from"),
        *_SAMPLES,
        ("rollbacks", "int", "rollbacks of this run so far"),
        ("why", "text", "the bad steps"),
    ),
    _entry(
        "WATCH", "straggler", "trainer", "A rank or a node was slower than the median in several readings in a row.",
        ("step", "int", "number of the step"),
        ("rank", "int?", "rank; null: the whole node"),
        ("node", "int", "node"),
        ("score", "number", "excess over the median, as a share of a step"),
        ("what", "text", "`data`, `compute` or `compute (burst)`"),
    ),
    _entry(
        "WATCH", "hang", "trainer", "Ranks wait in a collective for others.",
        ("ranks", "list", "ranks that are missing; empty: all are there, so the network or a GPU hangs"),
        ("nodes", "list", "their nodes"),
        ("collective", "text", "the collective that the others wait in"),
        ("why", "text", "evidence, in one line"),
    ),
    _entry(
        "WATCH", "stopped", "agent", "A process of a rank was stopped (SIGSTOP, a debugger): nothing goes on.",
        ("rank", "int", "rank"),
        ("pid", "int", "number of the process on its node"),
        ("why", "text", "the same as a sentence, with the command that lets it go on"),
    ),
    _entry(
        "WATCH", "continued", "agent", "A process of a rank that was stopped goes on, or has ended.",
        ("rank", "int", "rank"),
        ("pid", "int", "number of the process on its node"),
        ("seconds", "number", "how long it was stopped"),
        ("why", "text", "the same as a sentence"),
    ),
)  # fmt: skip

_BY_NAME: Mapping[tuple[str, str], EventType] = {(entry.phase, entry.event): entry for entry in CATALOG}

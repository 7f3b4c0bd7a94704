"""A spec is taken whole or refused with every fault at once, each with its path and what to write instead."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.checks.profiles import resolve
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.core.expect import Expect
from trainmaster.core.plan import ExitRecord, Plan
from trainmaster.core.schema import Parts, build, describe, to_plain, to_stated
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.states import Reason

GOOD = {"name": "trial", "resources": {"processes_per_node": 2}, "train": {"steps": 40}}


def faults(mapping: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(mapping)
    return {fault.path: fault.message for fault in caught.value.faults}


def test_five_mistakes_give_five_messages_with_paths() -> None:
    found = faults(
        {
            "nam": "trial",
            "resources": {"nodes": 0},
            "train": {"steps": "many", "optimizer": {"lr": 7}},
            "target": "local",
            "name": "trial",
            "limits": {"grace_s": -1},
        }
    )
    assert set(found) == {"nam", "resources.nodes", "train.steps", "train.optimizer.lr", "limits.grace_s"}
    assert "did you mean `name`" in found["nam"]
    assert "at least 1" in found["resources.nodes"]
    assert "whole number" in found["train.steps"]
    assert "at most 1" in found["train.optimizer.lr"]


def test_faults_between_fields_are_named_with_those_inside_them() -> None:
    """`train` plus `command`, each with a fault of its own, and a zone: all at once, not one round after the other."""
    with pytest.raises(SpecError) as found:
        parse_spec({"name": "a", "train": {"steps": "many"}, "command": ["x", 5], "zone": "Atlantis", "env": {"": "x"}})
    paths = [fault.path for fault in found.value.faults]
    assert {"train.steps", "train", "zone", "env."} <= set(paths) and len(paths) == len(set(paths))
    with pytest.raises(SpecError) as found:
        parse_spec({"name": "a", "limits": {"grace_s": -1}})
    assert [fault.path for fault in found.value.faults] == ["limits.grace_s", "train"]


def test_a_fault_of_a_pattern_states_what_is_allowed() -> None:
    found = faults({"name": "a", "command": ["x"], "project": "My Lab"})
    assert found["project"].startswith("'My Lab' does not fit: 1 to 63 letters, digits, dots, dashes and underscores")


def test_gpus_of_a_job_are_its_processes() -> None:
    found = faults({"name": "a", "command": ["x"], "resources": {"gpus": 8}})
    assert found["resources.gpus"].endswith("GPUs are not requested: set processes_per_node to their number")


def test_a_missing_name_says_what_to_write() -> None:
    assert "name: llama-8b-trial" in faults({"command": ["true"]})["name"]


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"command": ["true"]}, "train", "exactly one"),
        ({"train": None}, "train", "exactly one"),
        ({"train": {"batch_sequences": 15, "steps": 40}}, "train.batch_sequences", "use 16"),
        ({"train": {"model": {"heads": 5}, "steps": 40}}, "train.model.heads", "use 4"),
        ({"train": {"steps": 5, "optimizer": {"warmup_steps": 10}}}, "train.optimizer.warmup_steps", "use 0"),
        ({"train": {"device": "gpu"}}, "train.device", "not one of auto, cpu, cuda"),
        ({"name": "Trial One"}, "name", "llama-8b-trial"),
        ({"env": {"A": 1}}, "env.A", 'put it in quotes: "1"'),
        ({"env": {"A=B": "1"}}, "env.A=B", "environment variable"),
        ({"resources": {"nodes": True}}, "resources.nodes", "whole number"),
        ({"resources": []}, "resources", "mapping"),
        ({"resources": {"spares": 1}}, "resources.spares", "a job of one node has no other"),
        ({"resources": {"nodes": 2, "spares": 1}, "train": None, "command": ["x"]}, "resources.spares", "our trainer"),
        (
            {"resources": {"nodes": 2, "spares": 1}, "train": {"steps": 40, "recovery": {"in_place": False}}},
            "resources.spares",
            "in_place",
        ),
        ({"limits": {"timeout_s": float("inf")}}, "limits.timeout_s", "finite"),
        ({"name": "a\x00b"}, "name", "NUL"),
        ({"zone": "Mars/Olympus"}, "zone", "Europe/Berlin"),
    ],
)
def test_each_fault_is_named(change: dict[str, Any], path: str, says: str) -> None:
    assert says in faults({**GOOD, **change})[path]


def test_a_number_that_yaml_reads_as_text_is_still_a_number() -> None:
    assert parse_spec({**GOOD, "train": {"optimizer": {"lr": "3e-4"}}}).train.optimizer.lr == 3e-4  # type: ignore[union-attr]


def test_not_even_a_mapping() -> None:
    assert "mapping" in faults(["a", "b"])[""]


def test_plain_form_reads_back_the_same() -> None:
    spec = parse_spec(GOOD)
    assert parse_spec(json.loads(json.dumps(to_plain(spec)))) == spec
    plan = Plan(attempt="a.1", spec=spec, folder="/a", checkpoints="/c")
    assert Plan.from_json(plan.to_json()) == plan
    record = ExitRecord(attempt="a.1", ok=False, ended_at="2026-01-01T00:00:00Z", reason=Reason.DISK_FULL)
    assert ExitRecord.from_json(record.to_json()) == record


def test_parts_that_were_built_before_are_taken_and_the_spec_is_the_same() -> None:
    parts: Parts = {}
    first = {**GOOD, "limits": {"timeout_s": 1}}
    other = {**GOOD, "name": "other", "limits": {"timeout_s": 2}}
    assert build(JobSpec, first, parts=parts) == build(JobSpec, first)
    again = build(JobSpec, other, parts=parts)
    assert again == build(JobSpec, other) and again.limits.timeout_s == 2
    assert again.train is build(JobSpec, first, parts=parts).train


def test_a_part_with_a_fault_is_not_kept_and_equal_values_of_other_types_are_other_parts() -> None:
    parts: Parts = {}
    build(JobSpec, {**GOOD, "resources": {"nodes": 1}}, parts=parts)
    for _ in range(2):
        with pytest.raises(SpecError) as caught:
            build(JobSpec, {**GOOD, "resources": {"nodes": True}}, parts=parts)
        assert [fault.path for fault in caught.value.faults] == ["resources.nodes"]


def test_stated_form_has_no_nulls_but_those_that_were_stated_and_reads_back_the_same() -> None:
    spec = parse_spec({
        "name": "a", "command": ["x", ""], "env": {"EMPTY": ""}, "limits": {"stall_minutes": None, "attempts": 2},
        "preflight": {"expect": {"gpus": 0}}, "slurm": {"partition": "gpu"},
    })  # fmt: skip
    stated = to_stated(spec)
    assert build(JobSpec, json.loads(json.dumps(stated))) == spec
    assert stated["limits"]["stall_minutes"] is None, "its default is a number"
    assert (stated["preflight"]["expect"], stated["slurm"]) == ({"gpus": 0}, {"partition": "gpu"})
    assert json.dumps(stated).count("null") == 1 and "inputs" not in stated and "train" not in stated
    full = to_plain(spec)
    assert all(stated[name] == value for name, value in full.items() if not isinstance(value, dict | list | None))
    for name, value in ((name, value) for name, value in full.items() if isinstance(value, dict)):
        kept = {key: inner for key, inner in value.items() if isinstance(inner, bool | int | float | str)}
        assert kept.items() <= stated.get(name, {}).items(), f"every value of {name} stays"


def test_every_field_is_described() -> None:
    rows = list(describe(JobSpec))
    assert {"name", "resources.nodes", "train.model.layers", "preflight.expect.gpus"} <= {row.path for row in rows}
    assert all(row.doc for row in rows), [row.path for row in rows if not row.doc]


@pytest.mark.parametrize("cls", [JobSpec, TrainConfig, Expect])
def test_defaults_are_themselves_valid(cls: type[Any]) -> None:
    needed = {"name": "x", "command": ["true"]} if cls is JobSpec else {}
    built = build(cls, needed)
    assert is_dataclass(built) and fields(built)


def test_expect_words() -> None:
    assert resolve(["gpus=8", "driver=580", "ram_gib=1.5"]).expect == Expect(gpus=8, driver="580", ram_gib=1.5)
    with pytest.raises(SpecError) as caught:
        resolve(["gpu=8", "gpus", "cpus=-1"])
    assert len(caught.value.faults) == 3
    assert "did you mean `gpus`" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([f.name for f in fields(JobSpec)]) | st.text(), json_values, max_size=6))
def test_any_mapping_is_taken_or_refused_with_faults(mapping: dict[str, Any]) -> None:
    try:
        spec = parse_spec(mapping)
    except SpecError as error:
        assert error.faults and all(fault.message for fault in error.faults)
    else:
        assert parse_spec(to_plain(spec)) == spec


# Numbers that become no process, file, memory, socket or time: seeds, shares, and what is only compared or multiplied.
NOT_A_SIZE = {
    "rent.gpu_memory_gib", "rent.memory_gib", "slurm.memory_gib",  # compared with what is offered
    "train.model.rope_theta", "train.model.rope_scaling.factor", "train.model.rope_scaling.low_freq_factor",
    "train.model.rope_scaling.high_freq_factor", "train.model.rope_scaling.original_tokens", "train.model.norm_eps",
    "train.model.sliding_window", "train.model.experts_per_token", "train.model.balance", "train.model.context_tokens",
    "train.data.seed", "train.data.parts.weight", "train.seed", "train.optimizer.grad_clip",
    "train.optimizer.warmup_steps", "train.optimizer.decay_steps", "train.optimizer.plateau_patience",
    "train.checkpoint.every_steps", "train.checkpoint.keep_every_steps", "train.checkpoint.memory.every_steps",
    "train.checkpoint.remote.every_steps", "train.checkpoint.managed.s3_every_steps",
    "train.checkpoint.max_lost_steps", "train.parallel.shard_ranks", "train.parallel.recompute_every",
    "train.watch.max_skipped", "train.watch.max_rollbacks", "train.watch.loss_spike", "train.watch.grad_spike",
    "train.watch.straggler_share", "train.watch.straggler_readings", "train.steps", "train.epoch_steps",
    "train.batch_tokens", "train.micro_sequences", "train.log_every_steps",
}  # fmt: skip


def numbers(cls: type, path: str = "") -> dict[str, Mapping[str, Any]]:
    """The metadata of every number of a spec, by its path."""
    found: dict[str, Mapping[str, Any]] = {}
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        hint = hints[item.name]
        kinds = {hint, *typing.get_args(hint)} - {...}
        if kinds & {int, float}:
            found[f"{path}{item.name}"] = item.metadata
        for inner in kinds:
            if is_dataclass(inner):
                found |= numbers(typing.cast(type, inner), f"{path}{item.name}.")
    return found


def test_every_number_that_becomes_processes_files_memory_or_time_is_bounded() -> None:
    free = {path for path, meta in numbers(JobSpec).items() if meta["le"] is None and meta["most"] is None}
    assert {path for path in free if not path.startswith("preflight.expect.")} == NOT_A_SIZE


@pytest.mark.parametrize(
    "path", ["resources.nodes", "resources.processes_per_node", "limits.timeout_s", "limits.grace_s"]
)
def test_a_number_above_its_bound_is_refused_in_a_new_spec_and_read_in_a_stored_one(path: str) -> None:
    section, name = path.split(".")
    spec = {"name": "a", "command": ["true"], section: {name: 10**8}}
    assert "at most" in faults(spec)[path]
    assert getattr(getattr(build(JobSpec, spec), section), name) == 10**8


@pytest.mark.parametrize("name", ["A\nB", "A B", "A\x1b[2J", "\u202eA"])
def test_a_name_of_the_environment_that_a_shell_would_misread_is_refused(name: str) -> None:
    assert any("environment variable" in message for message in faults({**GOOD, "env": {name: "1"}}).values())


@pytest.mark.parametrize(("word", "read"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_on_and_off_without_quotes_are_the_words(word: object, read: str) -> None:
    """YAML 1.1 reads them as booleans."""
    config = build(TrainConfig, {"checkpoint": {"memory": {"use": word}}})
    assert config.checkpoint.memory.use == read

"""Shapes as JSON and back: unknown fields and words of a newer server, missing fields of an older one."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from trainmaster import api
from trainmaster.api import codec
from trainmaster.api.access import Token
from trainmaster.api.costs import Cost
from trainmaster.api.events import Event
from trainmaster.api.jobs import Job, JobLine, Submitted
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage, Status

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
LINE = JobLine(
    id="a", name="trial", project="lab", target="local", status=Status.RUNNING, stage=Stage.RUNNING, reason=None,
    message="", attempts=1, step=3, steps=10, progress=0.3, loss=2.5, tokens_per_s=None, created_at=AT, started_at=AT,
    ended_at=None,
)  # fmt: skip
MODULES = [importlib.import_module(f"trainmaster.api.{one.name}") for one in pkgutil.iter_modules(api.__path__)]
SHAPES = sorted(
    {
        kind
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    },
    key=lambda kind: kind.__name__,
)


def test_there_are_shapes() -> None:
    assert {"JobPage", "Event", "CostPage", "Error"} <= {kind.__name__ for kind in SHAPES}
    assert len({kind.__name__ for kind in SHAPES}) == len(SHAPES), "one name, one shape"


@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
def test_a_shape_is_a_frozen_keyword_only_dataclass_with_known_types(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen and "__slots__" in vars(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    codec._hints(kind)  # a type that cannot be resolved could not be decoded


def test_a_shape_survives_json() -> None:
    assert codec.decode(JobLine, codec.to_plain(LINE)) == LINE
    assert codec.decode(JobLine, codec.to_plain(LINE)).created_at == AT


def test_unknown_fields_and_words_of_a_newer_server_are_tolerated() -> None:
    sent = {**codec.to_plain(LINE), "status": "hibernating", "stage": "thawing", "mood": "good"}
    line = codec.decode(JobLine, sent)
    assert line.status == "hibernating" and line.stage == "thawing" and not line.final
    assert codec.decode(JobLine, {**sent, "status": "completed"}).final


def test_fields_that_an_older_server_does_not_send_are_none() -> None:
    sent = codec.to_plain(LINE)
    del sent["tokens_per_s"], sent["cost_cents"]
    assert codec.decode(JobLine, sent) == LINE
    with pytest.raises(TypeError, match="known_cents"):
        codec.decode(Cost, {"cents": None, "unknown_parts": 0})


def test_a_row_fills_a_shape_by_name() -> None:
    @dataclasses.dataclass
    class Row:
        id: int
        name: str
        role: Role
        project: str | None
        created_at: datetime
        used_at: datetime | None
        revoked_at: datetime | None
        hash: str

    row = Row(1, "alice", Role.USER, None, AT, None, None, "secret")
    token = codec.fill(Token, row, project="lab")
    assert (token.name, token.project) == ("alice", "lab") and not hasattr(token, "hash")


def test_a_submission_is_a_job() -> None:
    assert issubclass(Submitted, Job) and {field.name for field in dataclasses.fields(Submitted)} - {
        field.name for field in dataclasses.fields(Job)
    } == {"new", "note"}


def test_the_cursor_of_an_event_is_its_attempt_number_and_offset() -> None:
    place: dict[str, Any] = {"attempt": "6f1c.12", "stream": "events.jsonl", "offset": 7, "length": 3}
    assert codec.decode(Event, {**place, "data": {}, "extra": {}}).cursor == (12, 7)


def test_json_has_times_in_utc_and_only_numbers_of_json() -> None:
    at = datetime(2026, 11, 15, 14, 30, tzinfo=ZoneInfo("Asia/Kolkata"))
    value = {"at": at, "status": Status.RUNNING, "data": MappingProxyType({"ä": (1, None)})}
    assert codec.to_json(value) == '{"at":"2026-11-15T09:00:00Z","status":"running","data":{"ä":[1,null]}}'
    with pytest.raises(ValueError, match="JSON"):
        codec.to_json({"loss": float("nan")})
    with pytest.raises(TypeError, match="holds a set"):
        codec.to_json({1})

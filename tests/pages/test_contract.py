"""Every page is a query and a frozen dataclass that is JSON without loss. Holds for pages that are yet to come."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import typing
from datetime import datetime
from types import MappingProxyType, ModuleType
from zoneinfo import ZoneInfo

import pytest

from pages import samples
from trainmaster import pages
from trainmaster.core.states import Status
from trainmaster.store import Database

MODULES = [importlib.import_module(f"trainmaster.pages.{name}") for name in pages.names()]


def test_there_are_pages() -> None:
    assert {"job", "jobs"} <= set(pages.names())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_page_is_a_query_and_a_frozen_dataclass(module: ModuleType) -> None:
    assert module.__doc__
    assert dataclasses.is_dataclass(module.Page)
    assert module.Page.__dataclass_params__.frozen
    assert next(iter(inspect.signature(module.read).parameters)) == "db"
    answer = typing.get_type_hints(module.read)["return"]
    assert module.Page in (answer, *typing.get_args(answer))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_json_is_the_dataclass(module: ModuleType, db: Database) -> None:
    story = samples.failed_run(db)
    needs_job = "job_id" in inspect.signature(module.read).parameters
    page = module.read(db, story.id) if needs_job else module.read(db)
    plain = json.loads(pages.to_json(page))
    assert set(plain) == {field.name for field in dataclasses.fields(page)}
    assert plain == pages.to_plain(page)


def test_json_has_times_in_utc_words_and_no_numbers_of_its_own() -> None:
    at = datetime(2026, 11, 15, 14, 30, tzinfo=ZoneInfo("Asia/Kolkata"))
    value = {"at": at, "status": Status.RUNNING, "data": MappingProxyType({"ä": (1, None)})}
    assert pages.to_json(value) == '{"at":"2026-11-15T09:00:00Z","status":"running","data":{"ä":[1,null]}}'
    with pytest.raises(ValueError, match="JSON"):
        pages.to_json({"loss": float("nan")})
    with pytest.raises(TypeError, match="holds a set"):
        pages.to_json({1})

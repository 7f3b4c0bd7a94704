"""Every page is a query and a frozen dataclass that is JSON without loss. Holds for pages that are yet to come."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import typing
from types import ModuleType

import pytest

from pages import samples
from trainmaster import pages
from trainmaster.api import codec
from trainmaster.store.database import Database

NAMES = sorted(module.name for module in pkgutil.iter_modules(pages.__path__) if not module.ispkg)
MODULES = [importlib.import_module(f"trainmaster.pages.{name}") for name in NAMES]


def test_there_are_pages() -> None:
    assert {"job", "jobs"} <= set(NAMES)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_page_is_a_query_and_a_frozen_dataclass(module: ModuleType) -> None:
    assert module.__doc__
    assert next(iter(inspect.signature(module.read).parameters)) == "db"
    answer = typing.get_type_hints(module.read)["return"]
    shape, *missing = typing.get_args(answer) or (answer,)
    assert dataclasses.is_dataclass(shape) and missing in ([], [type(None)])
    assert typing.cast("typing.Any", shape).__dataclass_params__.frozen


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_json_is_the_dataclass(module: ModuleType, db: Database) -> None:
    story = samples.failed_run(db)
    needs_job = "job_id" in inspect.signature(module.read).parameters
    page = module.read(db, story.id) if needs_job else module.read(db)
    plain = json.loads(codec.to_json(page))
    assert set(plain) == {field.name for field in dataclasses.fields(page)}
    assert plain == codec.to_plain(page)

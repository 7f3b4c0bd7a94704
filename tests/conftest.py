"""What tests of several folders share: a real browser, a database of each kind, an S3 server."""

from __future__ import annotations

import gc
import inspect
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from hypothesis import settings

import slurm as slurm_testbed
from fork_server import IMPORTS, ForkServer, share
from postgres import Postgres, binaries
from s3_server import S3, serve
from slurm import Cluster
from trainmaster.core.event_catalog import CHECK_VARIABLE
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

pytest_plugins = ["cpu_times", "log_capture", "quiet_workers", "spawn_guard", "sampling", "testbeds"]

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

BOTH_DATABASES = "TRAINMASTER_BOTH_DATABASES"  # `make test-both`

# Property tests repeat the same 40 cases in every run; `make properties` draws 1,000 new. A slow machine is no failure.
settings.register_profile("repeatable", max_examples=40, derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("repeatable")

# Every event that an agent or a trainer emits in any test, in this process or in another, is held to the catalogue.
os.environ[CHECK_VARIABLE] = "1"

# readline, which pytest imports, exports the size of a terminal to the workers: consoles would keep that width.
for size in ("COLUMNS", "LINES"):
    os.environ.pop(size, None)

# Until the tests are collected nothing becomes garbage that is worth a search: `pytest_collection_finish` ends this.
gc.disable()

# Started in the background by a shell, all of this ignores Ctrl-C, and so would the programs whose Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: we go on, and what a test starts has the default
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    """The workers' programs come from one process, but where each worker counts the seconds of what it starts."""
    import cpu_times  # a plugin: pytest is the first to import it

    if getattr(config.option, "numprocesses", None) and cpu_times.VARIABLE not in os.environ:
        shared = share()
        shared.__enter__()
        config.add_cleanup(lambda: shared.__exit__(None, None, None))


def pytest_collection_finish() -> None:
    """Modules and test items stay to the end: each full pass of the collector over them would take half a second."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # at Python's own 700 the collector took 6% of the time of tests without processes


@pytest.fixture(scope="module")  # no wider: while it is open its thread has a running event loop
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}; install it, for example: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with serve(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A tab that fails its test if anything went wrong in it or left this machine."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()

    def look(request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("file", "data") and address.hostname != "127.0.0.1":
            wrong.append(f"left this machine: {request.url}")

    page.on("request", look)
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server for all tests; `postgres.create()` makes a database in it."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server; install it, for example: apt-get install postgresql")
    server = Postgres(programs)
    yield server
    server.close()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm of three nodes with fake GPUs, one for all tests."""
    import testbeds  # a plugin: pytest is the first to import it

    yield testbeds.keep("slurm").enter_context(slurm_testbed.start(tmp_path_factory.mktemp("slurm")))
    testbeds.close("slurm")


@pytest.fixture(scope="session")
def programs() -> Iterator[ForkServer]:
    """Ranks and verbs without their seconds of imports."""
    server = ForkServer(*IMPORTS)
    yield server
    server.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The kinds of `database_url`: both where SQL is what is tested, and in every test with `make test-both`.

    A test says so by naming `database_url` or `any_db` itself, or by the mark `both_databases`. Others get a database
    through a fixture of their folder, and SQLite stands for both. Outside of store/, where SQL is written and tested,
    those on PostgreSQL are proofs, of which `make test` draws some (sampling.py).
    """
    if "database_url" not in metafunc.fixturenames:
        return
    named = {"database_url", "any_db"} & set(inspect.signature(metafunc.function).parameters)
    marked = metafunc.definition.get_closest_marker("both_databases") is not None
    kinds: list[Any] = ["sqlite"]
    if named or marked or BOTH_DATABASES in os.environ:
        drawn = [] if metafunc.definition.path.parent.name == "store" else [pytest.mark.proof]
        kinds.append(pytest.param("postgresql", marks=[pytest.mark.spawns, *drawn]))
    metafunc.parametrize("database_url", kinds, indirect=True)


@pytest.fixture
def database_url(request: pytest.FixtureRequest, migrated_file: Path, tmp_path: Path) -> str:
    """Where a database with the schema and no row is."""
    if request.param == "sqlite":
        return str(shutil.copyfile(migrated_file, tmp_path / "trainmaster.db"))
    server: Postgres = request.getfixturevalue("postgres")
    return server.create(template=request.getfixturevalue("migrated_template"))


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database with the schema and no row, to be copied: migrating takes 0.1 s, a copy nothing."""
    path = tmp_path_factory.mktemp("migrated") / "trainmaster.db"
    open_database(path).close()
    return path


@pytest.fixture(scope="session")
def migrated_template(postgres: Postgres) -> str:
    """The same in PostgreSQL: the name of a database that nobody is connected to."""
    url = postgres.create()
    open_database(url).close()
    return url.rpartition("/")[2]


@pytest.fixture
def db(migrated_file: Path, tmp_path: Path) -> Iterator[Database]:
    """An open SQLite database."""
    database = open_database(shutil.copyfile(migrated_file, tmp_path / "trainmaster.db"))
    yield database
    database.close()


@pytest.fixture
def any_db(database_url: str) -> Iterator[Database]:
    """An open database of the test's kinds."""
    db = open_database(database_url)
    yield db
    db.close()

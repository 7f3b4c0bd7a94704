"""A drained machine is found however its target is spelled: a relative path, `..`, a known name, or none at all."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from control import test_dispatch as base
from pages import samples
from trainmaster import targets
from trainmaster.cli.main import build
from trainmaster.control.context import Context
from trainmaster.control.queueing import dispatch, places
from trainmaster.control.queueing import machines as drains
from trainmaster.core.errors import UsageError
from trainmaster.storage import open_store
from trainmaster.store import known_targets
from trainmaster.store.capacity import machines
from trainmaster.store.database import Database


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "proj"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return write_hosts(folder / "hosts.yaml")


def write_hosts(path: Path, *names: str) -> Path:
    (path.parent / "known_hosts").write_text("x ssh-ed25519 AAAA\n")
    machines = "".join(f"  - {{name: {name}, host: 192.0.2.1}}\n" for name in names or ("gpu-01", "gpu-02"))
    path.write_text(f"known_hosts: known_hosts\nhosts:\n{machines}")
    return path


def use(db: Database, word: str) -> None:
    """A job that was submitted there."""
    samples.Story(db, samples.spec(target=word))


def is_closed(db: Database, word: str, name: str = "gpu-01") -> bool:
    """Whether the queue starts nothing there for a job of this target."""
    return any(
        row.machine == name and row.drained for row in machines.list_machines(db, place=targets.find_place(word))
    )


@pytest.mark.parametrize("spelled", ["ssh:hosts.yaml", "ssh:./hosts.yaml", "ssh:../proj/hosts.yaml"])
def test_a_drain_counts_for_the_job_however_both_spell_the_file(db: Database, hosts: Path, spelled: str) -> None:
    job = targets.traits("ssh").make_absolute("ssh:../proj/hosts.yaml", hosts.parent)
    assert job == f"ssh:{hosts}", "what submit keeps has no .."
    drains.drain(db, "gpu-01", reason="a fan", on=spelled)
    for word in (job, f"ssh:{hosts.parent}/../proj/hosts.yaml", f"tm-lab@ssh:{hosts}"):
        assert is_closed(db, word), word
    drains.readmit(db, "gpu-01", on=f"ssh:{hosts}")
    assert not is_closed(db, job)
    with pytest.raises(UsageError, match="no machine 'gpu-09' there; it has gpu-01, gpu-02"):
        drains.drain(db, "gpu-09", reason="a fan", on=spelled)


def test_dots_after_a_link_lead_where_the_system_goes(tmp_path: Path) -> None:
    real = tmp_path / "real" / "inner"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    assert targets.find_place(f"ssh:{tmp_path}/link/../h.yaml") == f"ssh:{tmp_path}/real/h.yaml"
    assert targets.find_place(f"ssh:{tmp_path}/link/h.yaml") == f"ssh:{tmp_path}/link/h.yaml"
    assert targets.find_place("ssh:lab") == "ssh:lab", "a name is no path"
    assert targets.find_place("ssh:~nobody-here-of-that-name/../h.yaml"), "answered, not raised"


def test_drains_of_other_spellings_are_found(db: Database, hosts: Path) -> None:
    now = datetime.now(UTC)
    with db.write() as conn:
        machines.drain(conn, f"ssh:{hosts.parent}/../proj/hosts.yaml", "gpu-01", reason="a fan", by="eve", at=now)
        machines.drain(conn, "ssh:hosts.yaml", "gpu-02", reason="a cable", by="eve", at=now)
    places.respell(db)
    assert is_closed(db, f"ssh:{hosts}")
    drains.readmit(db, "gpu-01", on="ssh:hosts.yaml")
    drains.readmit(db, "gpu-02", on="ssh:hosts.yaml")
    assert machines.list_machines(db) == []


def test_the_queue_respells_before_its_first_pass(db: Database, hosts: Path, tmp_path: Path) -> None:
    target = base.Shared(0)
    with db.write() as conn:
        old = f"ssh:{hosts.parent}/../proj/hosts.yaml"
        machines.drain(conn, old, "gpu-01", reason="a fan", by="eve", at=datetime.now(UTC))
    store = open_store(tmp_path / "storage")
    context = Context(db=db, home=tmp_path, load=target.load, token="a", storage=store, kinds={})
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert is_closed(db, f"ssh:{hosts}")


def test_a_machine_of_a_used_or_known_target_needs_no_on(db: Database, hosts: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no machine 'gpu-01' of the queue is known"):
        drains.drain(db, "gpu-01", reason="a fan")
    use(db, f"ssh:{hosts}")
    use(db, f"ssh:{tmp_path}/gone.yaml")
    drains.drain(db, "gpu-01", reason="a fan")
    assert is_closed(db, f"ssh:{hosts}")
    drains.readmit(db, "gpu-01")
    other = write_hosts(tmp_path / "other.yaml", "gpu-01", "gpu-07")
    with db.write() as conn:
        known_targets.insert_target(conn, "gpus", f"ssh:{other}", at=datetime.now(UTC))
    drains.drain(db, "gpu-07", reason="a fan", on="gpus")
    assert is_closed(db, f"ssh:{other}", "gpu-07")
    several = f"gpu-01 is a machine of several targets \\(ssh:{other}, ssh:{hosts}\\); say which with --on"
    with pytest.raises(UsageError, match=several):
        drains.drain(db, "gpu-01", reason="a fan")
    drains.drain(db, "gpu-01", reason="a fan", on="gpus")
    drains.readmit(db, "gpu-01")  # the only one that is drained
    assert not is_closed(db, f"ssh:{other}")


def test_the_command_line_drains_by_a_relative_path(hosts: Path, tmp_path: Path) -> None:
    home = ["--home", str(tmp_path / "home")]
    words = ["nodes", "drain", "gpu-01", "--reason", "a fan", "--on", f"ssh:{os.path.relpath(hosts)}", *home]
    done = CliRunner().invoke(build(guarded=True), words)
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(build(guarded=True), ["nodes", "--json", *home]).stdout
    assert f'"target": "ssh:{hosts}"' in shown

"""A remote user gets the trained model: the newest checkpoint of a job, verified, and as an HF model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from client.served import serve
from trainmaster.cli.main import build
from trainmaster.control import checkpoints
from trainmaster.core.config.train import ModelConfig
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.spec import parse_spec
from trainmaster.models.family import weight_shapes
from trainmaster.store import jobs
from trainmaster.store.migrate import open_database
from trainmaster.train.checkpoint.weights import save_weights

JOB, EMPTY = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11", "7f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a12"
SCRIPT = "8f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a13"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a job that saved a checkpoint and one that did not."""
    home = tmp_path_factory.mktemp("home")
    config = ModelConfig()
    shapes = weight_shapes(config)
    save_weights(home / "jobs" / JOB / "checkpoints", config, lambda name: torch.ones(shapes[name]))
    db = open_database(home / "trainmaster.db")
    with db.write() as conn:
        for job, name in ((JOB, "trained"), (EMPTY, "empty")):
            jobs.insert_job(conn, job, parse_spec({"name": name, "train": {"steps": 40}}), at=datetime.now(UTC))
        jobs.insert_job(conn, SCRIPT, parse_spec({"name": "script", "command": ["true"]}), at=datetime.now(UTC))
    db.close()
    return home


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    db = open_database(home / "trainmaster.db")
    with serve(db, home) as address:
        yield address
    db.close()


def run(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(build(), list(map(str, words)))


@pytest.mark.parametrize("there", [True, False])
def test_the_newest_checkpoint_is_fetched_and_exported(home: Path, url: str, tmp_path: Path, there: bool) -> None:
    where = ["--server", url] if there else ["--home", home]
    done = run("fetch", "trained", tmp_path / "model", "--checkpoint", *where)
    assert done.exit_code == 0, done.exception
    for file in (home / "jobs" / JOB / "checkpoints/step-00000000").iterdir():
        assert (tmp_path / "model/step-00000000" / file.name).read_bytes() == file.read_bytes()
    done = run("export", "trained", tmp_path / "hf", *where)
    assert done.exit_code == 0, done.exception
    assert (tmp_path / "hf/config.json").exists() and list((tmp_path / "hf").glob("*.safetensors"))
    assert not list(tmp_path.glob(".export-*")), "the copy is gone"
    refused = run("fetch", "empty", tmp_path / "none", "--checkpoint", *where)
    assert isinstance(refused.exception, TrainmasterError) and "saved no checkpoint" in str(refused.exception)


@pytest.mark.parametrize("where", [[], ["--server", "http://127.0.0.1:9"]])
def test_a_folder_that_is_no_checkpoint_is_said_so_without_a_home_or_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINMASTER_HOME", str(tmp_path / "home"))
    (tmp_path / "out").mkdir()
    ended = run("export", "out", "model", *where)
    assert isinstance(ended.exception, TrainmasterError) and "neither a checkpoint" in str(ended.exception)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("there", [True, False])
def test_the_newest_checkpoint_of_a_script_is_fetched(home: Path, url: str, tmp_path: Path, there: bool) -> None:
    where = ["--server", url] if there else ["--home", home]
    refused = run("fetch", "script", tmp_path / "none", "--checkpoint", *where) if there else None
    assert refused is None or "TRAINMASTER_CHECKPOINTS" in str(refused.exception)
    saved = home / "jobs" / SCRIPT / "checkpoints"
    for number, name in enumerate(("checkpoint-9/model", "checkpoint-10/sub/model", "rank-0/a", "rank-1/a", "latest")):
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_text(f"{name} {there}")
        os.utime((saved / name).parent, (number, number))
    with contextlib.suppress(FileExistsError):
        (saved / "checkpoint-10" / "out").symlink_to("/etc/passwd")
        (saved / "elsewhere").symlink_to("/etc")
    for _ in range(2):  # a file of the same size is not taken for the same
        done = run("fetch", "script", tmp_path / "to", "--checkpoint", *where)
        assert done.exit_code == 0, done.exception
        place = tmp_path / "to" / "checkpoints"
        files = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}
        names = ("checkpoint-10/sub/model", "rank-0/a", "rank-1/a", "latest")
        assert files == {name: (saved / name).read_text() for name in names}
        (saved / "latest").write_text(f"LATEST {there}")


def test_a_manifest_cannot_lead_out_of_its_folder(home: Path, url: str, tmp_path: Path) -> None:
    """The job owns the folder: a name with a slash, or a link, is not read."""
    evil = home / "jobs" / EMPTY / "checkpoints" / "step-00000007"
    evil.mkdir(parents=True)
    (evil / "manifest.json").write_text('{"files": {"../../../../trainmaster.db": {"size_bytes": 5, "sha256": "x"}}}')
    assert "saved no checkpoint" in str(run("fetch", "empty", tmp_path, "--checkpoint", "--server", url).exception)
    (evil / "manifest.json").write_text('{"files": {"weights": {"size_bytes": 5, "sha256": "x"}}}')
    (evil / "weights").symlink_to("/etc/passwd")
    assert run("fetch", "empty", tmp_path / "x", "--checkpoint", "--server", url).exit_code != 0
    assert not (tmp_path / "x/step-00000007/weights").exists()


def test_a_checkpoint_folder_that_is_a_link_is_not_read(home: Path, url: str, tmp_path: Path) -> None:
    """Else a job could exchange it, between two reads, for any folder that the server may read."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text('{"files": {"weights": {"size_bytes": 6, "sha256": "x"}}}')
    (elsewhere / "weights").write_text("secret")
    place = home / "jobs" / EMPTY / "checkpoints" / "step-00000009"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(elsewhere)
    db = open_database(home / "trainmaster.db")
    try:
        job = jobs.find_job(db, EMPTY)
        assert job is not None
        with pytest.raises(TrainmasterError, match="no checkpoint of step 9"):
            checkpoints.find_step(home, job, 9)
        listing = checkpoints.CheckpointListing(folder=place, step=9, files={"weights": (6, "x")})
        with pytest.raises(TrainmasterError, match="weights"):
            checkpoints.read(listing, "weights", offset=0, limit=6)
    finally:
        db.close()
        place.unlink()

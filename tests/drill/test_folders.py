"""Folders of a drill: copies that lead nowhere else, and the checkpoints that are found and damaged in them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from trainmaster.core.errors import UsageError
from trainmaster.core.spec import JobSpec
from trainmaster.drill import folders, plan
from trainmaster.drill.record import Setup
from trainmaster.drill.run import CommandDrill


def test_the_working_folder_is_copied_without_its_tools(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in (".git/x", ".venv/x", "a/__pycache__/x", "a/train.py", "data/large"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    folders.copy_work(work, tmp_path / "copy", links=("data",))
    made = sorted(str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*"))
    assert made == ["a", "a/train.py", "data"]
    assert (tmp_path / "copy/data").readlink() == work / "data"
    folders.copy_work(work, work / "proof" / "work")  # a drill's folder inside it is not copied into itself
    assert not (work / "proof" / "work" / "proof").exists()


@pytest.mark.parametrize("link", ["ckpt", "a/ckpt"])
def test_a_link_to_the_users_own_files_is_refused_before_anything_is_made(link: str, tmp_path: Path) -> None:
    work, own = tmp_path / "work", tmp_path / "scratch"
    (work / "a").mkdir(parents=True)
    own.mkdir()
    (work / link).symlink_to(own)
    top = link.split("/", maxsplit=1)[0]
    with pytest.raises(UsageError, match=f"{link} is a link to {own}, outside .* only reads it: --link {top}"):
        folders.copy_work(work, tmp_path / "copy")
    with pytest.raises(UsageError, match="is a link to"):
        CommandDrill(Setup(spec=JobSpec(name="x", command=("true",)), work=work), tmp_path / "out").run()
    assert not (tmp_path / "copy").exists() and not (tmp_path / "out").exists()
    folders.copy_work(work, tmp_path / "linked", links=(f"{top}/",))
    assert (tmp_path / "linked" / link).resolve() == own, "as it was asked for"
    with pytest.raises(UsageError, match="directly in it"):
        folders.copy_work(work, tmp_path / "nested", links=("a/ckpt",))


def test_a_link_within_the_working_folder_stays_within_its_copy(tmp_path: Path) -> None:
    work, copy = tmp_path / "mine", tmp_path / "copy"
    (work / "runs/1").mkdir(parents=True)
    for name, target in {"all": work / "runs", "runs/up": "../../mine/runs", "runs/last": "1", "gone": "none"}.items():
        (work / name).symlink_to(target)
    (work / ".venv").symlink_to("/usr")  # left out
    folders.copy_work(work, copy)
    links = {str(path.relative_to(copy)): str(path.readlink()) for path in copy.rglob("*") if path.is_symlink()}
    assert links == {"all": "runs", "runs/up": ".", "runs/last": "1", "gone": "none"}


def test_a_virtual_environment_of_any_name_is_no_way_to_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "work" / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "work" / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "work" / "venv" / "bin" / "python").symlink_to("/usr/bin/env")
    folders.copy_work(tmp_path / "work", tmp_path / "copy")
    assert (tmp_path / "copy" / "venv" / "bin" / "python").is_symlink()


def test_a_folder_that_is_too_large_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with (tmp_path / "data").open("wb") as file:
        file.truncate(folders.MOST_BYTES + 1)
    with pytest.raises(UsageError, match="--link NAME"):
        folders.copy_work(tmp_path, tmp_path / "copy")
    folders.copy_work(tmp_path, tmp_path / "linked", links=("data",))
    with pytest.raises(UsageError, match="no such entry"):
        folders.copy_work(tmp_path, tmp_path / "other", links=("data", "nothing"))


def test_checkpoints_are_told_from_logs_and_from_each_other(tmp_path: Path) -> None:
    big = b"x" * 1000
    for name in (
        "checkpoint-5/model.bin",
        "checkpoint-5/optimizer.bin",
        "checkpoint-10/model.bin",
        "run.log",
        "latest",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(big if "/" in name or name == "run.log" else b"10")
    found = folders.find_checkpoints([tmp_path], since=0.0)
    assert sorted([path.name for path in checkpoint.files] for checkpoint in found) == [
        ["model.bin"], ["model.bin", "optimizer.bin"],
    ]  # fmt: skip
    assert folders.find_checkpoints([tmp_path], since=1e12) == []


def test_files_of_one_step_are_one_checkpoint_whatever_else_has_a_number(tmp_path: Path) -> None:
    names = ["v2/epoch=1-step=10.ckpt", "v2/epoch=1-step=15.ckpt", "m/model_0010.pt", "m/optim_0010_rank3.pt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 1000)
    found = [[path.name for path in one.files] for one in folders.find_checkpoints([tmp_path], since=0.0)]
    assert sorted(found) == [
        ["epoch=1-step=10.ckpt"],
        ["epoch=1-step=15.ckpt"],
        ["model_0010.pt", "optim_0010_rank3.pt"],
    ]


@pytest.mark.parametrize("kind", plan.DAMAGE)
def test_damage_is_what_it_says(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(bytes(1000))
    (tmp_path / "b.pt").write_bytes(bytes(900))
    checkpoint = folders.Checkpoint(name="a", files=(file, tmp_path / "b.pt"), at=0.0)
    assert folders.damage(checkpoint, kind, random.Random(0)) == file
    if kind == "missing":
        assert not file.exists()
    elif kind == "truncated":
        assert file.read_bytes() == bytes(500)
    elif kind == "unfinished":
        assert file.read_bytes() == b""
    else:
        assert sum(byte.bit_count() for byte in file.read_bytes()) == 1
        assert len(file.read_bytes()) == 1000
    assert (tmp_path / "b.pt").exists() == (kind != "unfinished")


@pytest.mark.parametrize(
    ("files", "name", "text", "found"),
    [
        (("step-0010.pt",), "latest", "10\n", True),
        (("step-0010.pt",), "latest", "15\n", False),
        (("run/step-10/a.pt", "run/step-10/b.pt"), "run/last_checkpoint", "/elsewhere/run/step-10", True),
        (("iter_0000010/mp_rank_03/a.pt",), "latest_checkpointed_iteration.txt", "10", True),
        (("checkpoint-10/a.pt",), "notes", "began on day 10, see the log", False),
        (("checkpoint-10/a.pt",), "history", "5\n10\n", False),
        (("model_10.pt", "optim_10.pt"), "model_10.json", "10", False),
    ],
)
def test_the_file_that_names_a_checkpoint_is_found(
    files: tuple[str, ...], name: str, text: str, found: bool, tmp_path: Path
) -> None:
    for file in (*files, name):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text if file == name else "x" * 1000)
    checkpoint = folders.Checkpoint(name="", files=tuple(tmp_path / file for file in files), at=0.0)
    assert folders.find_pointer(checkpoint, [tmp_path]) == (tmp_path / name if found else None)


def test_a_link_names_a_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "step-10").mkdir()
    (tmp_path / "latest").symlink_to("step-10")
    checkpoint = folders.Checkpoint(name="", files=(tmp_path / "step-10/a.pt",), at=0.0)
    assert folders.find_pointer(checkpoint, [tmp_path]) == tmp_path / "latest"


def test_the_folder_of_an_earlier_drill_is_not_copied(tmp_path: Path) -> None:
    source, proof = tmp_path / "mine", tmp_path / "mine" / "proof"
    (proof / "reference").mkdir(parents=True)
    (proof / folders.REPORT).write_text("{}")
    (source / "train.py").write_text("")
    (source / "reference").mkdir()
    (proof / "reference" / "data").symlink_to("/etc")  # as the program of that drill left it: nobody follows it
    (proof / "large").write_bytes(b"x" * 5000)
    assert folders.measure(source) == 0
    folders.copy_work(source, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["reference", "train.py"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python resolves such a link to itself")
def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "sub" / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="leads to itself"):
        folders.copy_work(tmp_path / "mine", tmp_path / "copy")

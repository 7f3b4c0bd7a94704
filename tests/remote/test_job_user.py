"""Folders of jobs that run as another Unix user: what root does there follows no link of the job."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from trainmaster.remote import confine, job_user

NOBODY = pwd.getpwnam("nobody")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def _owner(path: Path) -> int:
    return path.lstat().st_uid


def test_the_attempt_is_the_users_and_the_folders_above_it_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "attempts" / "1"
    job_user.claim(folder, NOBODY)
    (folder / "plan.json").write_text("{}")
    job_user.give(folder, NOBODY)
    job = tmp_path / "job"
    theirs = [folder, folder / "plan.json", job / "work", job / "checkpoints"]
    assert {_owner(path) for path in theirs} == {NOBODY.pw_uid}
    assert {_owner(path) for path in (job, folder.parent)} == {0}
    assert {path.stat().st_mode & 0o777 for path in (job, folder.parent)} == {0o710}
    assert {path.stat().st_mode & 0o077 for path in (folder, job / "work", job / "checkpoints")} == {0}


@pytest.mark.parametrize("link", ["attempts", "attempts/2"])
def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path, link: str) -> None:
    """A folder that the job owned, as those of earlier versions: its first attempt put a link there."""
    victim, job = tmp_path / "etc", tmp_path / "job"
    victim.mkdir(mode=0o755)
    (victim / "shadow").write_text("root")
    job.mkdir()
    (job / link).parent.mkdir(exist_ok=True)
    (job / link).symlink_to(victim)
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
        job_user.claim(job / "attempts" / "2", NOBODY)
    assert _owner(victim) == _owner(victim / "shadow") == 0
    assert victim.stat().st_mode & 0o777 == 0o755 and [path.name for path in victim.iterdir()] == ["shadow"]


def test_the_command_that_confines_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.struct_passwd(("tm-lab", "x", 4711, 4712, "", "/home/tm-lab", "/bin/sh"))
    monkeypatch.setattr(confine, "find_fault", lambda: "")
    monkeypatch.setattr(confine, "may_hide_tmp", lambda _: True)
    monkeypatch.setenv(confine.PROCESSES, "100")
    words = confine.confine(["agent", "plan.json"], user, tmp=Path("/srv/tmp"))
    assert words is not None and words[-2:] == ["agent", "plan.json"]
    text = " ".join(words)
    for part in ("--pid --mount-proc --kill-child", "mount --bind", "--reuid=4711 --regid=4712 --clear-groups",
                 "--no-new-privs", "--nproc=100"):  # fmt: skip
        assert part in text
    assert text.index("mount --bind") < text.index("--reuid") < text.index("--nproc"), "root mounts, the user runs"
    monkeypatch.setattr(confine, "may_hide_tmp", lambda _: False)
    monkeypatch.setenv(confine.PROCESSES, "many")
    words = confine.confine(["agent"], user, tmp=tmp_path)
    assert words is not None and "mount --bind" not in " ".join(words) and "--nproc=16384" in words
    monkeypatch.setattr(confine, "find_fault", lambda: "no namespaces")
    assert confine.confine(["agent"], user, tmp=tmp_path) is None

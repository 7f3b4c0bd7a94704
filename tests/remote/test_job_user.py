"""Folders of jobs that run as another Unix user: what root does there follows no link of the job."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from trainmaster.remote import confine, job_user, memory_limit

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


def test_a_job_of_our_own_user_is_closed_too(tmp_path: Path) -> None:
    """On a disk that several accounts share, what an account makes is open to all by default."""
    (open_to_all := tmp_path / "shared").mkdir(mode=0o777)
    job_user.claim(open_to_all / "jobs" / "a" / "attempts" / "1", None)
    (open_to_all / "jobs" / "b").mkdir(mode=0o755)  # of an upload, or an earlier version
    job_user.make_private(open_to_all / "jobs" / "b")
    closed = (open_to_all / "jobs", open_to_all / "jobs" / "a", open_to_all / "jobs" / "b")
    assert {path.stat().st_mode & 0o777 for path in closed} == {0o700}


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
    monkeypatch.setattr(memory_limit, "limit", lambda words: ["in-a-group", *words])
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


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_of_a_job_has_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    above = tmp_path if version == 2 else tmp_path / "memory"
    above.mkdir(exist_ok=True)
    known = {2: {"cgroup.controllers": "cpu memory", "cgroup.subtree_control": "cpu"}, 1: {"memory.limit_in_bytes": ""}}
    for name, text in known[version].items():
        (above / name).write_text(text)
    monkeypatch.setenv(memory_limit.LIMIT, "1.5")
    assert memory_limit.find_fault(tmp_path) == ""
    words = memory_limit.limit(["unshare", "x"], tmp_path)
    group = Path(words[4])
    assert words[-2:] == ["unshare", "x"] and group.parent == above / "trainmaster"
    file = {2: "memory.max", 1: "memory.limit_in_bytes"}[version]
    assert (group / file).read_text() == str(3 << 29)
    if version == 2:  # a group without this has no such file
        assert {(place / "cgroup.subtree_control").read_text() for place in (above, group.parent)} == {"+memory"}
    monkeypatch.setenv(memory_limit.LIMIT, "much")
    assert 0 < memory_limit.find_limit_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert "no memory controller" in memory_limit.find_fault(tmp_path / "nothing")
    assert memory_limit.limit(["x"], tmp_path / "nothing") == ["x"]


@pytest.mark.spawns
def test_a_job_that_takes_too_much_memory_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault := confine.find_fault() or memory_limit.find_fault():
        pytest.skip(fault)
    monkeypatch.setenv(memory_limit.LIMIT, "0.1")
    take = ["/usr/bin/python3", "-c", "import sys; x = b'x' * (int(sys.argv[1]) << 20); print('taken')"]
    done = []
    for mebibytes in ("10", "400"):
        words = confine.confine([*take, mebibytes], NOBODY, tmp=tmp_path)
        assert words is not None
        done.append(subprocess.run(words, check=False, capture_output=True, text=True, timeout=60))
    assert [(each.returncode, each.stdout) for each in done] == [(0, "taken\n"), (137, "")], done

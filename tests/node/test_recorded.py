"""A captured machine answers as the real one did, and says so when it was not asked."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from trainmaster.core.errors import (
    CommandMissing,
    CommandTimedOut,
    FileMissing,
    FileUnreadable,
    HostError,
    NotCaptured,
    UsageError,
)
from trainmaster.node.host import Host
from trainmaster.node.recorded import CapturingHost, RecordedHost


@pytest.mark.spawns
def test_every_answer_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SETTING", "8")
    live = CapturingHost(Host(), tmp_path / "machine")
    told = [
        live.run("sh", "-c", "echo out; echo err >&2; exit 3"),
        live.run("sh", "-c", "echo other"),
        live.read("/proc/self/limits"),
        live.list("/proc/sys/kernel"),
        live.disk("/"),
        live.env("SOME_SETTING"),
        live.env("NOT_SET_ANYWHERE"),
        live.kernel_clock(),
        live.hostname(),
        live.cpus(),
    ]
    replay = RecordedHost(tmp_path / "machine")
    ran = replay.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (3, "out\n", "err\n")
    assert replay.run("sh", "-c", "echo other").stdout == "other\n"
    assert told[2:] == [
        replay.read("/proc/self/limits"),
        replay.list("/proc/sys/kernel"),
        replay.disk("/"),
        replay.env("SOME_SETTING"),
        replay.env("NOT_SET_ANYWHERE"),
        replay.kernel_clock(),
        replay.hostname(),
        replay.cpus(),
    ]


@pytest.mark.spawns
def test_refusals_replay_as_what_they_were(tmp_path: Path) -> None:
    live = CapturingHost(Host(), tmp_path / "machine")
    replay_of = {
        CommandMissing: lambda host: host.run("no-such-program-here"),
        CommandTimedOut: lambda host: host.run("sleep", "600", timeout_s=0.1),
        FileMissing: lambda host: host.read("/proc/no-such-file"),
    }
    for kind, ask in replay_of.items():
        with pytest.raises(kind) as real:
            ask(live)
        with pytest.raises(kind) as replayed:
            ask(RecordedHost(tmp_path / "machine"))
        assert str(real.value) == str(replayed.value)


@pytest.mark.parametrize(
    "ask",
    [
        lambda host: host.run("nvidia-smi"),
        lambda host: host.read("/proc/meminfo"),
        lambda host: host.list("/sys"),
        lambda host: host.disk("/"),
        lambda host: host.env("HOME"),
        lambda host: host.kernel_clock(),
        lambda host: host.hostname(),
        lambda host: host.cpus(),
    ],
)
def test_what_was_not_captured_is_never_taken_for_absent(tmp_path: Path, ask: object) -> None:
    CapturingHost(Host(), tmp_path / "machine")
    with pytest.raises(NotCaptured):
        ask(RecordedHost(tmp_path / "machine"))  # type: ignore[operator]
    assert not issubclass(NotCaptured, FileMissing)


def test_secrets_never_enter_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sekret")
    monkeypatch.setenv("HARMLESS", "yes")
    live = CapturingHost(Host(), tmp_path / "machine")
    assert live.env("HF_TOKEN") == "hf_abcdef"
    assert live.env("AWS_SECRET_ACCESS_KEY") == "sekret"
    live.env("HARMLESS")
    live.read("/proc/self/environ")
    everything = b"".join(path.read_bytes() for path in (tmp_path / "machine").rglob("*") if path.is_file())
    assert b"yes" in everything
    assert b"hf_abcdef" not in everything
    assert b"sekret" not in everything
    with pytest.raises(NotCaptured):
        RecordedHost(tmp_path / "machine").env("HF_TOKEN")


def test_a_person_may_write_a_machine_by_hand(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text(json.dumps({"v": 1, "env": {"A": "b"}}))
    (tmp_path / "files" / "proc").mkdir(parents=True)
    (tmp_path / "files" / "proc" / "meminfo").write_text("MemTotal: 1 kB\n")
    host = RecordedHost(tmp_path)
    assert host.read("/proc/meminfo") == "MemTotal: 1 kB\n"
    assert host.env("A") == "b"


def test_a_capture_is_not_written_over(tmp_path: Path) -> None:
    CapturingHost(Host(), tmp_path)
    with pytest.raises(UsageError, match="already holds"):
        CapturingHost(Host(), tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"v": 9}'])
def test_a_folder_that_is_no_capture_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "answers.json").write_text(text)
    with pytest.raises(UsageError):
        RecordedHost(tmp_path)


def test_an_answer_damaged_by_hand_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text(json.dumps({"v": 1, "run": {"nvidia-smi": "x"}, "disk": {"/": [1]}}))
    host = RecordedHost(tmp_path)
    for ask in (lambda: host.run("nvidia-smi"), lambda: host.disk("/")):
        with pytest.raises(HostError):
            ask()


def test_a_path_cannot_leave_the_capture(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text('{"v": 1}')
    (tmp_path / "outside").write_text("x")
    for path in ("/../outside", "outside", "/a/../../outside"):
        with pytest.raises(ValueError):
            RecordedHost(tmp_path).read(path)


def test_the_reason_of_a_refusal_replays(tmp_path: Path) -> None:
    """The first page of a process's own memory is not mapped: the kernel answers EIO."""
    live = CapturingHost(Host(), tmp_path / "machine")
    with pytest.raises(FileUnreadable) as real:
        live.read("/proc/self/mem")
    with pytest.raises(FileUnreadable) as replayed:
        RecordedHost(tmp_path / "machine").read("/proc/self/mem")
    assert real.value.code == replayed.value.code == errno.EIO


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"message": "x cannot be read: Invalid argument"}, errno.EINVAL),  # of a capture before the field was there
        ({"message": "x cannot be read: Permission denied"}, errno.EACCES),
        ({"message": "x", "errno": "EIO"}, errno.EIO),
        ({"message": "x is larger than 4 MiB"}, None),
        ({"message": "x", "errno": "ENONSENSE"}, None),
    ],
)
def test_the_reason_of_a_recorded_refusal(tmp_path: Path, entry: dict[str, str], code: int | None) -> None:
    answers = {"v": 1, "read": {"/sys/x": {"error": "FileUnreadable", **entry}}}
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    with pytest.raises(FileUnreadable) as refused:
        RecordedHost(tmp_path).read("/sys/x")
    assert refused.value.code == code

"""Captured machines: recorded as plain files, and replayed from them.

    answers.json            every short answer: exit codes, folder listings, disks, variables, and each error
    files/proc/meminfo      the text of a file, under its own path
    commands/NAME.out       output of a command; answers.json maps commands to names

A file put into files/ by hand is an answer; everything else must be in answers.json. Anything else raises NotCaptured,
which no check may take for "absent".
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainmaster.core import errors
from trainmaster.core.errors import FileUnreadable, HostError, NotCaptured, UsageError
from trainmaster.core.files import write_whole
from trainmaster.node.host import CommandResult, Disk, Host, KernelClock, Snapshot

ANSWERS = "answers.json"
# Why the kernel refuses a file of /proc or /sys.
_REASONS = (
    errno.EACCES, errno.EPERM, errno.EINVAL, errno.EIO, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.ENOSYS,
    errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN,
)  # fmt: skip
_VERSION = 1
# Captures are sent to other people. Variables with such names are never recorded.
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie|private|environ|id_rsa", re.IGNORECASE)


class CapturingHost(Snapshot):
    """A host that records every answer of another host in a folder."""

    def __init__(self, inner: Host, folder: Path) -> None:
        super().__init__(inner)
        if (folder / ANSWERS).exists():
            raise UsageError(f"{folder} already holds a captured machine; name another folder")
        self._folder = folder
        self._written: dict[str, Any] = {"v": _VERSION}
        folder.mkdir(parents=True, exist_ok=True)
        self._save()

    def _keep(self, kind: str, key: Any, answer: object) -> None:
        name = shlex.join(key) if kind == "run" else str(key)
        if kind in ("env", "read") and _SECRET.search(name):
            return
        with self._mutex:
            self._written.setdefault(kind, {})[name] = self._entry(kind, name, answer)
            self._save()

    def _entry(self, kind: str, name: str, answer: object) -> object:
        """Entry for answers.json; long text goes into a file beside it."""
        if isinstance(answer, HostError):
            code = errno.errorcode.get(answer.code or 0) if isinstance(answer, FileUnreadable) else None
            return {"error": type(answer).__name__, "message": str(answer), **({"errno": code} if code else {})}
        if isinstance(answer, CommandResult):
            stem = f"commands/{re.sub(r'[^A-Za-z0-9.-]+', '_', name)[:80]}"
            while any(stem == other.get("text") for other in self._written.get("run", {}).values()):
                stem += "_"
            self._put(f"{stem}.out", answer.stdout)
            self._put(f"{stem}.err", answer.stderr)
            return {"exit_code": answer.exit_code, "took_s": round(answer.took_s, 3), "text": stem}
        if kind == "read":
            self._put(_inside(name), str(answer))
            return {}
        if isinstance(answer, (Disk, KernelClock)):
            return asdict(answer)
        return answer

    def _put(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())

    def _save(self) -> None:
        # Complete at every moment: if a check kills this process, the record up to then remains.
        text = json.dumps(self._written, indent=2, sort_keys=True) + "\n"
        write_whole(self._folder / ANSWERS, text, durable=False)


class RecordedHost(Host):
    """A machine replayed from a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        try:
            answers = json.loads((folder / ANSWERS).read_text(encoding="utf-8"))
        except OSError:
            raise UsageError(f"{folder} holds no captured machine: there is no {ANSWERS} in it") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{folder / ANSWERS} is not JSON: {error}") from None
        if not isinstance(answers, dict) or answers.get("v") != _VERSION:
            raise UsageError(f"{folder / ANSWERS} is not a capture of version {_VERSION}")
        self._answers: dict[str, Any] = answers

    def run(self, *argv: str, timeout_s: float = 30.0) -> CommandResult:  # noqa: ARG002 (the answer is already there)
        name = shlex.join(argv)
        answer = self._mapping("run", name)
        return CommandResult(
            argv=argv,
            exit_code=int(answer["exit_code"]),
            stdout=self._text(f"{answer['text']}.out", name),
            stderr=self._text(f"{answer['text']}.err", name),
            took_s=float(answer["took_s"]),
        )

    def read(self, path: str) -> str:
        if path in self._answers.get("read", {}):
            self._answer("read", path)
        return self._text(_inside(path), path)

    def list(self, path: str) -> tuple[str, ...]:
        return tuple(map(str, self._answer("list", path)))

    def disk(self, path: str) -> Disk:
        return Disk(**self._mapping("disk", path))

    def env(self, name: str) -> str | None:
        value = self._answer("env", name)
        return None if value is None else str(value)

    def kernel_clock(self) -> KernelClock:
        return KernelClock(**self._mapping("clock", ""))

    def _answer(self, kind: str, name: str) -> Any:
        of_kind = self._answers.get(kind, {})
        if name not in of_kind:
            raise self._nothing(kind, name)
        answer = of_kind[name]
        if isinstance(answer, Mapping) and "error" in answer:
            raise _refusal(str(answer["error"]), str(answer.get("message", name)), answer.get("errno"))
        return answer

    def _mapping(self, kind: str, name: str) -> Mapping[str, Any]:
        answer = self._answer(kind, name)
        if not isinstance(answer, Mapping):
            raise HostError(f"{self._folder / ANSWERS}: {kind} {name!r} is not a mapping")
        return answer

    def _text(self, name: str, key: str) -> str:
        place = self._folder / name
        # A capture may come from an untrusted machine: paths outside it are refused.
        if not place.resolve().is_relative_to(self._folder.resolve()):
            raise self._nothing("read", key)
        try:
            return place.read_bytes().decode("utf-8", errors="replace")
        except OSError:
            raise self._nothing("read", key) from None

    def _nothing(self, kind: str, name: str) -> NotCaptured:
        return NotCaptured(f"the captured machine {self._folder.name} does not hold {kind} {name}".rstrip())


def _inside(path: str) -> str:
    """Path of a machine's file within the capture."""
    if not path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a whole path")
    return "files" + os.path.normpath(path)


def _refusal(kind: str, message: str, code: object) -> HostError:
    """Error of an entry. `code` is the name of an errno; captures without one have it in the words of the message."""
    error_type = getattr(errors, kind, HostError)
    if not isinstance(error_type, type) or not issubclass(error_type, HostError):
        return HostError(message)
    if not issubclass(error_type, FileUnreadable):
        return error_type(message)
    names = {name: number for number, name in errno.errorcode.items()}
    said = next((number for number in _REASONS if os.strerror(number).lower() in message.lower()), None)
    return error_type(message, code=names.get(str(code), said))


def open_host(*, replay: Path | None = None, capture: Path | None = None) -> Host:
    """This machine or a captured one; reads are recorded to `capture` if given."""
    host = Host() if replay is None else RecordedHost(replay)
    return host if capture is None else CapturingHost(host, capture)

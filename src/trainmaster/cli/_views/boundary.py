"""Error boundary of every verb: an error of the machine, the user or a missing package is one line and an exit code.

Our own mistakes (KeyError, AssertionError, …) are not caught: they keep their traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer

from trainmaster.cli import _console, interrupt
from trainmaster.core.errors import MissingExtra, TrainmasterError, install_command

# Exit code 1 of these verbs means FAIL. An error is no verdict: it ends with 2 or 3.
VERDICT_VERBS = frozenset({"accept", "bandwidth", "check", "drill", "isolate", "rejudge"})
CREATING_VERBS = frozenset({"submit", "resume"})
USAGE, INCOMPLETE = 2, 3
# The extra that installs a top-level package; where several do, the smallest.
EXTRAS = {
    "alembic": "server", "fastapi": "server", "jinja2": "server", "prometheus_client": "server",
    "sqlalchemy": "server", "starlette": "server", "uvicorn": "server", "httpx": "client",
    "psycopg": "postgres", "apprise": "notify", "asyncssh": "ssh", "boto3": "aws",
    "botocore": "aws", "obstore": "storage", "torch": "train", "numpy": "train", "safetensors": "hf",
    "pyarrow": "data", "tokenizers": "data", "huggingface_hub": "data", "datasets": "data",
    "amzn_sagemaker_checkpointing": "hyperpod", "s3torchconnector": "hyperpod",
}  # fmt: skip
_OUTPUT = (errno.ENOSPC, errno.EBADF, errno.EIO)  # without a name they come from a stream, not from a file
_DATABASE = frozenset({"sqlalchemy", "sqlite3", "psycopg", "alembic"})


def guard(verb: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The verb behind the boundary, with its signature as typer reads it."""

    @functools.wraps(verb)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with boundary(name):
            return verb(*args, **kwargs)

    return guarded


@contextlib.contextmanager
def boundary(verb: str) -> Iterator[None]:
    """End with one line and an exit code where the block raises an error that is not our mistake."""
    interrupt.restore()
    try:
        try:
            yield
        finally:
            _flush()  # here, and not at the interpreter's end, where a full disk is a traceback
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _say_quietly(lambda: _console.note("interrupted"))
        raise typer.Exit(interrupt.INTERRUPTED) from None
    except BrokenPipeError:
        # `trainmaster jobs | head` closes our output: no error. A verdict that could not be printed is not a PASS.
        _discard_output()
        raise typer.Exit(INCOMPLETE if verb in VERDICT_VERBS else 0) from None
    except TrainmasterError as error:
        _say_quietly(functools.partial(_console.error, error, creates=verb in CREATING_VERBS))
        raise typer.Exit(INCOMPLETE if verb in VERDICT_VERBS and error.exit_code == 1 else error.exit_code) from None
    except Exception as error:
        text = describe(error)
        if text is None:
            raise
        if isinstance(error, OSError) and error.filename is None:
            _discard_output()
        _say_quietly(functools.partial(_console.error, TrainmasterError(text)))
        raise typer.Exit(USAGE) from None


def describe(error: BaseException) -> str | None:
    """An error of the machine, a database, TLS or an installation in one line; None for our own mistakes."""
    if isinstance(error, ImportError):
        return _describe_import(error)
    if type(error).__module__.partition(".")[0] in _DATABASE:
        return f"the database refused: {_first_line(getattr(error, 'orig', None) or error)}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {_first_line(error)}"
    if isinstance(error, OSError):
        return _describe_os(error)
    if isinstance(error, UnicodeDecodeError):
        return f"text that is not {error.encoding.upper()}: {error.reason} at byte {error.start}; save it as UTF-8"
    if isinstance(error, UnicodeError):
        return f"text that cannot be encoded: {_first_line(error)}; set PYTHONIOENCODING=utf-8"
    return None


def _describe_import(error: ImportError) -> str | None:
    package = (error.name or "").partition(".")[0]
    if package == "trainmaster":
        return None
    if package in EXTRAS:
        return str(MissingExtra(f"this ({package})", EXTRAS[package]))
    return f"a package cannot be imported: {_first_line(error)}; run: {install_command('all')}"


def _describe_os(error: OSError) -> str:
    reason = error.strerror or _first_line(error) or type(error).__name__
    if error.errno == errno.ENOSPC:
        reason += "; free some space, or choose another place"
    if error.filename is None:
        return f"output cannot be written: {reason}" if error.errno in _OUTPUT else reason
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
    return f"{name}: {reason}"


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _flush() -> None:
    if sys.stdout is not None:  # None where the caller closed it
        sys.stdout.flush()


def _discard_output() -> None:
    """Send what is still in the buffer of a closed or full output nowhere: its flush at the end would fail again."""
    try:
        _flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def _say_quietly(say: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # a closed terminal: the exit code is all that is left to give
        say()

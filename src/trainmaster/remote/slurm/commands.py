"""Slurm's commands as programs: run one with a clean environment, and judge what its failure means."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainmaster.core.compat import waiting
from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.remote import job_user

TIMEOUT_S = 60.0
# Nothing was sent: the controller could not be connected to.
_NO_CONTACT = re.compile(r"Unable to contact slurm controller|Connection refused|No route to host|Unable to resolve")
# The request may or may not have arrived.
_UNCLEAR = re.compile(
    r"Socket timed out|Zero Bytes were transmitted|Communication connection|send/recv|Connection reset|in standby mode"
    r"|Connection timed out|Unexpected message received|Transport endpoint|temporarily unavailable"
)


class OutcomeUnknown(Unreachable):
    """A request without an answer: it may have been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """A command that ended."""

    out: str
    err: str
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Slurm's programs on this machine: their folder, and variables over our own environment."""

    folder: str | None = None
    env: Mapping[str, str] | None = None

    async def run(self, *words: str, timeout_s: float = TIMEOUT_S) -> CommandResult:
        """Run a command to its end. TargetError where it is missing, OutcomeUnknown where it does not end in time."""
        # Not ours: sbatch hands its environment to the job, and the controller keeps it.
        environment = {**job_user.job_environment(os.environ), **(self.env or {})}
        environment.setdefault("PATH", os.defpath)
        program = f"{self.folder}/{words[0]}" if self.folder else words[0]
        try:
            process = await asyncio.create_subprocess_exec(
                program, *words[1:], env=environment, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            where = "their folder is `commands` in a file (--on slurm:cluster.yaml), a machine that has them is `login`"
            text = f"slurm: {program} cannot be run: {error.strerror}; install Slurm's commands: {where}"
            raise TargetError(text) from None
        try:
            async with waiting.timeout(timeout_s):
                out, err = await process.communicate()
        except BaseException as error:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if isinstance(error, TimeoutError):
                raise OutcomeUnknown(f"slurm: {words[0]} did not end in {timeout_s:g} s") from None
            raise
        assert process.returncode is not None
        return CommandResult(
            out=out.decode(errors="replace"), err=err.decode(errors="replace"), code=process.returncode
        )

    async def query(self, *words: str, timeout_s: float = TIMEOUT_S) -> str:
        """Output of a command that must succeed. Unreachable where the controller does not answer."""
        result = await self.run(*words, timeout_s=timeout_s)
        if result.code == 0:
            return result.out
        raise failure(words, result)


def failure(words: Sequence[str], result: CommandResult) -> TargetError:
    """The error for a command that failed, by what Slurm printed."""
    output = " ".join((result.err or result.out).split())[:500] or "it printed nothing"
    text = f"slurm: {words[0]} ended with {result.code}: {output}"
    if _NO_CONTACT.search(output):
        return Unreachable(text)
    if result.code < 0 or _UNCLEAR.search(output):
        return OutcomeUnknown(text)
    return TargetError(text)

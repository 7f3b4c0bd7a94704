"""Programs on this machine as on any other node: the bootstrap as a process of its own, which ends with this one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence

from trainmaster.core.errors import NodeUnavailable
from trainmaster.targets._answers import deadline, encode_order, find_answer, make_order, parse_results
from trainmaster.targets._nodes import Node, Program, Result, Transfer

_EXTRA_S = 10.0  # for the start of Python, beside its programs


class LocalNodes:
    """This machine."""

    def __init__(self) -> None:
        self.transfer = Transfer()

    async def nodes(self) -> list[Node]:
        return [Node(name=socket.gethostname(), address="127.0.0.1")]

    async def run(self, node: Node, programs: Sequence[Program], timeout_s: float) -> list[Result]:  # noqa: ARG002 (one)
        order = make_order(programs, deadline_s=deadline(timeout_s), package=None, watch=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trainmaster.remote.bootstrap", encode_order(order),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(timeout_s + _EXTRA_S):
                body, stderr = await asyncio.gather(process.stdout.read(), process.stderr.read())
                code = await process.wait()
        except TimeoutError:
            reason = f"it gave no answer in {timeout_s:g} s"
            raise NodeUnavailable(reason, action="see what its Python or file system waits for") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()  # it ends its programs first
                await process.wait()
        data = find_answer(body, order["nonce"])
        if data is None:
            end = " ".join(stderr.decode(errors="replace").split())[-300:] or "nothing was printed"
            raise NodeUnavailable(f"{sys.executable} ended with {code}: {end}", action="run `trainmaster check` here")
        self.transfer.received_bytes += len(data)
        return parse_results(data, len(programs))

    async def close(self) -> None:
        """Nothing is held between two programs."""

"""SIGTERM ends work in the way of Ctrl-C: by cancelling it, so that it can clean up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from trainmaster.cluster import termination
from trainmaster.targets._runs import Owner
from trainmaster.targets.slurm.node_list import SlurmNode
from trainmaster.targets.slurm.retest import reserve


def test_sigterm_cancels_the_work_which_cleans_up_first() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        termination.run(work())
    assert (ended, signal.getsignal(signal.SIGTERM)) == (["cleaned up"], before)


@pytest.mark.parametrize("nested", [False, True])
def test_a_second_sigterm_does_not_end_the_clean_up(nested: bool) -> None:
    """`timeout` sends it twice."""
    ended: list[str] = []

    async def clean_up() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        ended.append("cleaned up")

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            if not nested:
                await clean_up()

    with asyncio.Runner() as runner, termination.until_terminated() if nested else contextlib.nullcontext():
        with pytest.raises(KeyboardInterrupt):
            termination.run(work(), runner=runner)
        if nested:
            termination.run(clean_up(), runner=runner)
    assert ended == ["cleaned up"]


def test_a_second_sigterm_does_not_end_the_clean_up_of_plain_code() -> None:
    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt), termination.until_terminated():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            ended.append("cleaned up")
    assert ended == ["cleaned up"]


def test_a_cluster_test_is_cancelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainmaster.cli._jobs import cluster_test
    from trainmaster.targets import kubernetes
    from trainmaster.targets.kubernetes import kubeconfig, retrying

    class Nothing:
        def __init__(self, _access: object) -> None: ...
        async def close(self) -> None: ...

    monkeypatch.setattr(kubernetes, "read_settings", lambda _: SimpleNamespace(kubeconfig="", context="", namespace=""))
    monkeypatch.setattr(kubeconfig, "load_access", lambda *_: None)
    monkeypatch.setattr(retrying, "RetryingClient", Nothing)
    ended: list[str] = []

    async def work(_client: object, _namespace: str) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.05)
            ended.append("removed")

    with pytest.raises(typer.Exit):
        cluster_test._Cluster(job_name="j", manifest=Path("m"), on="kubernetes").call(work)
    assert ended == ["removed"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_reservation_whose_making_was_interrupted_is_removed(number: int) -> None:
    """Cancelled while Slurm makes it: it is there all the same, for ever, unless it is ended."""
    made: set[str] = set()

    class Slurm:
        async def request(self, _what: str, *, words: list[str], **_: object) -> tuple[dict[str, object], bytes]:
            if words[:2] == ["scontrol", "create"]:
                signal.raise_signal(number)
                made.add(words[3].partition("=")[2])
                await asyncio.sleep(0.05)
            if words[:2] == ["scontrol", "delete"]:
                made.discard(words[2].partition("=")[2])
            return {"code": 0}, b"root"

    node = SlurmNode(name="n1", states=("IDLE", "DRAIN"), reason="trainmaster: ecc", gpus="")

    async def retest() -> None:
        async with reserve(Slurm(), node, Owner(home="0" * 8, run="1" * 12)):  # type: ignore[arg-type]
            await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        termination.run(retest())
    assert made == set()


def test_between_two_runs_sigterm_is_an_interrupt() -> None:
    async def answer() -> int:
        return 7

    before = signal.getsignal(signal.SIGTERM)
    with asyncio.Runner() as runner, termination.until_terminated():
        assert termination.run(answer(), runner=runner) == 7
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert termination.run(answer(), runner=runner) == 7, "the loop can still be used to clean up"
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_wakes_a_loop_that_waits() -> None:
    async def work() -> None:
        await asyncio.sleep(30)

    main, began = threading.get_ident(), time.monotonic()
    other = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGTERM))
    other.start()
    with pytest.raises(KeyboardInterrupt):
        termination.run(work())
    other.join()
    assert time.monotonic() - began < 20


def test_work_in_another_thread_runs_without_a_handler() -> None:
    async def answer() -> int:
        return 7

    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(termination.run(answer())))
    other.start()
    other.join()
    assert found == [7]


def test_a_second_ctrl_c_does_not_end_the_clean_up_and_a_third_does(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def work(times: int) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(30)
        finally:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.1)
            ended.append("cleaned up")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        termination.run(work(1))
    assert ended == ["cleaned up"] and "Ctrl-C once more leaves it there" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        termination.run(work(2))
    assert ended == ["cleaned up"] and signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """A shell starts a program in the background so."""

    async def work() -> int:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.1)
        return 7

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert termination.run(work()) == 7
    finally:
        signal.signal(signal.SIGINT, before)

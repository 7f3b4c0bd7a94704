"""Many jobs that want slots of a few machines at once: each gets one, and the machines are asked few times."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sshd import Lab, needs_sshd
from trainmaster import targets
from trainmaster.core.errors import NoCapacity, TargetError
from trainmaster.targets.ssh import slots
from trainmaster.targets.ssh.session import Reply, Session

pytestmark = [pytest.mark.spawns, needs_sshd]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How many requests of each kind each machine gets."""
    count: Counter[tuple[str, str]] = Counter()
    ask = Session.ask

    async def counted(self: Session, method: str, **params: Any) -> Reply:
        count[self.host.name, method] += 1
        return await ask(self, method, **params)

    monkeypatch.setattr(Session, "ask", counted)
    return count


def test_jobs_that_come_at_once_share_the_questions_and_try_no_slot_twice(
    hosts_file: Path, place: Any, run: Any, asked: Counter[tuple[str, str]]
) -> None:
    target = targets.load(f"ssh:{hosts_file}")
    plans = [target.plan(place("true", number=number)) for number in range(1, 14)]

    async def go() -> list[Any]:
        found = await asyncio.gather(*(target.place(one) for one in plans), return_exceptions=True)
        for one in plans:
            await target.release({**one.handle, "nodes": []})
        return found

    found = run(go())
    placed = [one for one in found if isinstance(one, dict)]
    assert Counter(node for one in placed for node in one["nodes"]) == {"n1": 4, "n2": 4, "n3": 4}
    (waits,) = [one for one in found if not isinstance(one, dict)]
    assert isinstance(waits, NoCapacity) and "0 of 3 are free" in str(waits)
    for name in ("n1", "n2", "n3"):
        assert asked[name, "offer"] <= 2  # the first job asks, the others share the next question
        assert asked[name, "claim"] == 4


def test_jobs_of_several_nodes_do_not_take_a_part_each(
    hosts_file: Path, place: Any, run: Any, asked: Counter[tuple[str, str]]
) -> None:
    """Each had one slot, gave it back, and tried again."""
    text = hosts_file.read_text()
    hosts_file.write_text(text.replace("slots: 4", "slots: 1"))
    target = targets.load(f"ssh:{hosts_file}")
    plans = [target.plan(place("true", number=number, resources={"nodes": 2})) for number in (1, 2, 3)]

    async def go() -> list[Any]:
        found = await asyncio.gather(*(target.place(one) for one in plans), return_exceptions=True)
        for one in plans:
            await target.release({**one.handle, "nodes": []})
        return found

    found = run(go())
    assert [one["nodes"] for one in found if isinstance(one, dict)] == [["n1", "n2"]]
    assert [type(one) for one in found if not isinstance(one, dict)] == [NoCapacity, NoCapacity]
    assert sum(count for (_, method), count in asked.items() if method == "claim") == 2


def test_a_job_that_gives_up_while_a_machine_is_asked_does_not_end_the_question(
    hosts_file: Path, place: Any, run: Any, asked: Counter[tuple[str, str]]
) -> None:
    target = targets.load(f"ssh:{hosts_file}")
    first, second = target.plan(place("true")), target.plan(place("true", number=2))

    async def go() -> None:
        given_up = asyncio.create_task(target.place(first))
        await asyncio.sleep(0)  # it has asked
        stays = asyncio.create_task(target.place(second))
        await asyncio.sleep(0)
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
        assert (await stays)["nodes"] == ["n1"]
        await target.release({**second.handle, "nodes": ["n1"]})

    run(go())
    assert asked["n1", "offer"] <= 2


@pytest.mark.parametrize("answer", [{"free": 4}, {"free": 4, "held": {}, "knows": []}, {"held": [], "knows": []}])
def test_a_machine_that_answers_nonsense_gets_no_job(
    machines: Lab, run: Any, box: Any, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    async def ask(*_: Any, **__: Any) -> Reply:
        return Reply(result=answer, body=b"")

    monkeypatch.setattr(Session, "ask", ask)

    async def go() -> None:
        await slots.reserve([box()], "a-job.1", 1)

    with pytest.raises(TargetError):
        run(go())

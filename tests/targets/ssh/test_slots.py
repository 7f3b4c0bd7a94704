"""Many jobs that want slots of a few machines at once: each gets one, and the machines are asked few times."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sshd import Lab, needs_sshd
from trainmaster import targets
from trainmaster.core.errors import NoCapacity, TargetError, Unreachable
from trainmaster.targets import Submission
from trainmaster.targets.ssh import slots
from trainmaster.targets.ssh.session import Reply, Session

pytestmark = [pytest.mark.spawns, needs_sshd]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How many requests of each kind each machine gets."""
    count: Counter[tuple[str, str]] = Counter()
    ask = Session.request

    async def counted(self: Session, method: str, **params: Any) -> Reply:
        count[self.host.name, method] += 1
        return await ask(self, method, **params)

    monkeypatch.setattr(Session, "request", counted)
    return count


async def place_at_once(target: targets.Target, plans: Sequence[Submission]) -> list[Any]:
    """What each job gets: its handle, or the error that it waits with. All slots are given back afterwards."""
    found = await asyncio.gather(*(target.place(one) for one in plans), return_exceptions=True)
    for one in plans:
        await target.release({**one.handle, "nodes": []})
    return found


@pytest.mark.proof
def test_jobs_that_come_at_once_share_the_questions_and_try_no_slot_twice(
    hosts_file: Path, place: Any, run: Any, asked: Counter[tuple[str, str]]
) -> None:
    target = targets.load(f"ssh:{hosts_file}")
    plans = [target.plan(place("true", number=number)) for number in range(1, 14)]

    found = run(place_at_once(target, plans))
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

    found = run(place_at_once(target, plans))
    (placed,) = [one["nodes"] for one in found if isinstance(one, dict)]
    assert len(set(placed)) == 2  # any two: a machine that is slow to answer is passed over
    assert [type(one) for one in found if not isinstance(one, dict)] == [NoCapacity, NoCapacity]
    assert sum(count for (_, method), count in asked.items() if method == "claim") == 2


@pytest.mark.proof
def test_the_first_attempt_waits_for_its_spare_and_a_later_one_does_not(hosts_file: Path, place: Any, run: Any) -> None:
    text = hosts_file.read_text()
    hosts_file.write_text(text.replace("slots: 4", "slots: 1"))
    target = targets.load(f"ssh:{hosts_file}")
    train = {"train": {"steps": 8}, "command": None, "resources": {"nodes": 2, "spares": 1}}
    first, later = (target.plan(place(number=number, **train)) for number in (1, 2))
    assert len(first.files) == len(first.commands) == 3

    async def go() -> tuple[Any, Any, Any]:
        whole = await target.place(first)
        await target.release(whole)
        other = await target.place(target.plan(place("true", number=3)))
        waits = (await asyncio.gather(target.place(first), return_exceptions=True))[0]
        again = await target.place(later)
        for handle in (other, again):
            await target.release(handle)
        return whole, waits, again

    whole, waits, again = run(go())
    assert (len(whole["nodes"]), whole["spares"]) == (3, 1)
    assert isinstance(waits, NoCapacity) and "waiting for 3 free machines" in str(waits)
    assert (len(again["nodes"]), again["spares"]) == (2, 0)


@pytest.mark.proof
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


@pytest.mark.proof
def test_a_slot_of_a_try_that_broke_off_is_given_back_when_the_job_has_to_wait(
    hosts_file: Path, place: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim found its machine gone; the slot of the other one was kept for 15 minutes, and nobody could have it."""
    hosts_file.write_text(hosts_file.read_text().replace("slots: 4", "slots: 1"))
    target = targets.load(f"ssh:{hosts_file}")
    wide = target.plan(place("true", resources={"nodes": 3}))
    others = [target.plan(place("true", number=number)) for number in (2, 3, 4)]
    ask = Session.request

    async def cut(self: Session, method: str, **params: Any) -> Reply:
        if self.host.name == "n3":
            raise Unreachable("n3: the connection was lost")
        return await ask(self, method, **params)

    async def go() -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(slots, "claim", _after_a_moment(patch, cut))
            with pytest.raises(Unreachable):
                await target.place(wide)
            with pytest.raises(NoCapacity):  # tried again, with two machines for three nodes
                await target.place(wide)
            found = [await target.place(one) for one in others[:2]]
        for one in (wide, *others):
            await target.release({**one.handle, "nodes": []})
        return found

    assert [one["nodes"] for one in run(go())] == [["n1"], ["n2"]]


def _after_a_moment(patch: pytest.MonkeyPatch, cut: Any) -> Any:
    """Claims that find a machine gone which had offered its slot; from then on it does not answer."""
    claim = slots.claim

    async def claimed(session: Session, attempt: str) -> bool:
        if session.host.name == "n3":
            await asyncio.sleep(1)  # the other machines have answered
            patch.setattr(Session, "request", cut)
        return await claim(session, attempt)

    return claimed


@pytest.mark.proof
def test_a_machine_that_refuses_a_claim_is_left_out(hosts_file: Path, machines: Lab, place: Any, run: Any) -> None:
    """One machine with a full disk, first in the file, ended every job although others were free."""
    target = targets.load(f"ssh:{hosts_file}")
    submission = target.plan(place("true"))

    async def go() -> Any:
        with contextlib.ExitStack() as stack:
            for one in machines.hosts[:2]:
                stack.enter_context(_full(one.home / ".trainmaster" / "claims" / one.name))
            placed = await target.place(submission)
        await target.release({**submission.handle, "nodes": []})
        return placed

    assert run(go())["nodes"] == ["n3"]


@contextlib.contextmanager
def _full(folder: Path) -> Iterator[None]:
    """A folder in which no file can be made, but those that are there can be opened: its file system has no inode."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=2", "tmpfs", str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems cannot be mounted here")
    try:
        (folder / ".lock").touch()
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.proof
def test_a_job_that_is_cut_off_before_its_claim_is_sent_takes_no_slot(
    hosts_file: Path, place: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot counted as being taken for as long as the connection lived."""
    hosts_file.write_text(hosts_file.read_text().replace("slots: 4", "slots: 1"))
    target = targets.load(f"ssh:{hosts_file}")
    first, second = target.plan(place("true")), target.plan(place("true", number=2, resources={"nodes": 3}))
    take = slots.SlotTable.take

    async def go() -> None:
        placing = asyncio.create_task(target.place(first))

        def cut(self: slots.SlotTable, session: Session, attempt: str) -> Any:
            placing.get_loop().call_soon(placing.cancel)  # as a timeout in the same turn of the loop would
            return take(self, session, attempt)

        with monkeypatch.context() as patch:
            patch.setattr(slots.SlotTable, "take", cut)
            with contextlib.suppress(asyncio.CancelledError):
                await placing
        assert placing.cancelled()
        await target.release({**first.handle, "nodes": []})
        assert len((await target.place(second))["nodes"]) == 3
        await target.release({**second.handle, "nodes": []})

    run(go())


@pytest.mark.parametrize("answer", [{"free": 4}, {"free": 4, "held": {}, "knows": []}, {"held": [], "knows": []}])
def test_a_machine_that_answers_nonsense_gets_no_job(
    machines: Lab, run: Any, box: Any, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    async def ask(*_: Any, **__: Any) -> Reply:
        return Reply(result=answer, body=b"")

    monkeypatch.setattr(Session, "request", ask)

    async def go() -> None:
        await slots.reserve([box()], "a-job.1", 1)

    with pytest.raises(TargetError):
        run(go())

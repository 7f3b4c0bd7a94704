"""Wrong data is found and named by rank, element and value, whatever bit, block or round it comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmaster.bench.collectives import COLLECTIVES, Sweep, measure, pattern
from trainmaster.bench.collectives.operations import Operation
from trainmaster.bench.collectives.pattern import Ruler
from trainmaster.core.results import Overall

CPU = torch.device("cpu")
SIZE = 6000  # bytes: 1500 elements
SICK_RANK = (sys.executable, str(Path(__file__).with_name("sick_rank.py")))


def ranks(name: str, world: int) -> list[Operation]:
    made = []
    for rank in range(world):
        send, recv = torch.zeros(2000, dtype=torch.int32), torch.zeros(2000, dtype=torch.int32)
        made.append(Operation(name, SIZE, rank=rank, world=world, send=send, recv=recv))
    return made


def exchange(name: str, world: int, salt: int) -> list[Operation]:
    """What a backend does, done by hand: the definition of each collective."""
    all_ranks, ruler = ranks(name, world), Ruler(CPU, 100)  # chunks of 100: buffers span many
    for one in all_ranks:
        ruler.draw(one.send, one.outgoing(salt))
    sent, block = [one.send.clone() for one in all_ranks], all_ranks[0].block
    for one in all_ranks:
        mine = slice(one.rank * block, (one.rank + 1) * block)
        match name:
            case "all_reduce":
                one.send.copy_(sum(sent[1:], sent[0]))
            case "reduce_scatter":
                one.recv.copy_(sum(sent[1:], sent[0])[mine])
            case "all_gather":
                one.recv.copy_(torch.cat(sent))
            case "all_to_all":
                one.recv.copy_(torch.cat([buffer[mine] for buffer in sent]))
            case "broadcast":
                one.send.copy_(sent[0])
            case "sendrecv":
                one.recv.copy_(sent[one.rank - 1])
    return all_ranks


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_right_data_is_right_and_that_of_another_round_is_not(name: str, world: int) -> None:
    for one in exchange(name, world, salt=5):
        assert Ruler(CPU, 100).compare(one.result, one.incoming(5)) is None
        assert Ruler(CPU, 1 << 20).compare(one.result, one.incoming(5)) is None
        stale = Ruler(CPU, 100).compare(one.result, one.incoming(6))
        assert stale is not None
        assert stale.count == one.result.numel()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_single_flipped_bit_is_found_where_it_is(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(COLLECTIVES))
    one = data.draw(st.sampled_from(exchange(name, 3, salt=1)))
    index, bit = data.draw(st.integers(0, one.result.numel() - 1)), data.draw(st.integers(0, 31))
    before = int(one.result[index]) & 0xFFFFFFFF
    one.result.view(torch.uint8)[index * 4 + bit // 8] ^= 1 << bit % 8
    found = Ruler(CPU, 100).compare(one.result, one.incoming(1))
    assert found is not None
    assert (found.index, found.expected, found.got, found.count) == (index, before, before ^ 1 << bit, 1)


def test_a_sum_without_one_rank_or_with_one_twice_is_wrong() -> None:
    for ruler in (Ruler(CPU, 100),):
        sent = [torch.zeros(300, dtype=torch.int32) for _ in range(4)]
        for rank, buffer in enumerate(sent):
            ruler.draw(buffer, pattern.sent(rank=rank, salt=0, first=0, count=300))
        whole = pattern.summed(world=4, salt=0, first=0, count=300)
        assert ruler.compare(sum(sent[1:], sent[0]), [whole]) is None
        assert ruler.compare(sent[0] + sent[1] + sent[2], [whole]) is not None
        assert ruler.compare(sent[0] + sent[1] + sent[2] + sent[2], [whole]) is not None


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_a_rank_that_receives_a_flipped_bit_fails_the_run_and_is_named(tmp_path: Path) -> None:
    sweep = Sweep(
        backend="gloo", processes=3, collectives=("all_gather", "broadcast"), min_bytes=12288, max_bytes=24576,
        seconds=0.01,
    )  # fmt: skip
    report = measure(sweep, folder=tmp_path, program=SICK_RANK, env={"SICK": "1:flip:broadcast:12288"}, least_gbps=1e-9)
    assert report.overall is Overall.FAIL
    (finding,) = report.results[1].findings
    assert finding.reason.startswith(f"rank 1 on {report.members[1].host} received wrong data in broadcast of 12 KiB")
    assert finding.values["index"] == 1234
    assert finding.values["expected"] ^ finding.values["got"] == 1 << 20
    assert [row.size_bytes for row in report.rows if row.wrong] == [12288]
    assert len(report.rows) == 4, "the others' results and the other sizes are kept"

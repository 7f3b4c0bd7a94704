"""Data on its way to the ranks: waited for together, named when late, given up with exit 65, resumed on any number."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sims.hub import Hub
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import DataError, SpecError
from trainmaster.datasets import Rows, Source
from trainmaster.datasets.corpus.prepare import Recipe, prepare
from trainmaster.train.drill import sample_log
from trainmaster.train.feed import Feed
from trainmaster.train.parallel import shard
from trainmaster.train.watch.stop import Stop

from .runs import ALONE, Ran, RunHere, Start, StopAfter, tiny

WORDS = ["ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "yew"]


def texts(count: int, *, start: int = 0) -> list[str]:
    return [
        f"tree {n}: " + " ".join(WORDS[n * k % 12] for k in range(1, 4 + n % 9)) for n in range(start, start + count)
    ]


def prepared(folder: Path, count: int = 600, share: float = 0.1) -> dict[str, Any]:
    raw = folder.with_suffix(".jsonl")
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count)))
    prepare([raw], folder, Recipe(held_out_share=share), processes=1, source={}, stamps=[])
    return {"source": "prepared", "path": str(folder)}


class Slow(Source):
    """Rows that come when they are let."""

    vocab, tokenizer, fingerprint = 256, "bytes", "slow"

    def __init__(self) -> None:
        self.let = threading.Event()

    def row(self, number: int, *, held_out: bool) -> Rows:
        if not self.let.wait(20):
            raise OSError("never let")
        row = torch.full((1, 32), number)
        return Rows(tokens=row, targets=row)


@pytest.fixture
def world() -> Any:
    joined = shard.join(ALONE, torch.device("cpu"), timeout_s=60)
    yield joined
    torch.distributed.destroy_process_group()


def test_waiting_is_measured_a_stop_is_heard_in_it_and_it_ends(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Slow()
    monkeypatch.setattr(Feed, "_load", lambda _: source)
    stop = Stop(tmp_path / "stop")
    feed = Feed(tiny(data={"wait_s": 1.0}), world, stop=stop)
    with pytest.raises(DataError, match=r"no data for the step at sample 0 after 1 s: rank 0 \(node 0\)"):
        feed.ready(0)
    assert feed.waited_s == 0  # an end is no wait
    threading.Timer(0.3, source.let.set).start()
    assert feed.ready(0)
    assert 0.2 < feed.waited_s < 15
    (batch,) = feed.take(0)
    assert batch.tokens[:, 0].tolist() == list(range(8))
    source.let.clear()
    (tmp_path / "stop").touch()
    assert not feed.ready(8 * 20), "told to stop while the data does not come"
    source.let.set()
    feed.close()


def test_what_cannot_be_read_is_told_by_rank_and_tried_again_first(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny(data=prepared(tmp_path / "set"))
    feed = Feed(config, world)
    hidden = (tmp_path / "set").rename(tmp_path / "away")
    feed._source.close()  # type: ignore[union-attr]  # its open files would survive the renaming
    threading.Timer(0.3, lambda: hidden.rename(tmp_path / "set")).start()
    assert feed.ready(0), "it was away for a moment"
    shards = list((tmp_path / "set").glob("train-*.tokens"))
    shards[0].write_bytes(b"")
    feed._source.close()  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"train-00000\.tokens ends early"):
        feed.ready(8 * 30)
    feed.close()


def test_a_config_that_does_not_fit_the_data_is_refused_with_what_to_write(world: Any, tmp_path: Path) -> None:
    data = prepared(tmp_path / "set", 60, share=0.1)
    with pytest.raises(SpecError) as told:
        Feed(tiny(data=data, model={"vocab": 200}, eval_sequences=64), world)
    assert [fault.path for fault in told.value.faults] == ["model.vocab", "eval_sequences"]
    assert "200 is less than the 256 tokens of prepared; use 256" in str(told.value)
    with pytest.raises(DataError, match="not enough for one row of 65536"):
        Feed(tiny(data=data, sequence_tokens=65536), world)


def test_other_data_under_the_same_path_is_not_gone_on_with(run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(data=prepared(tmp_path / "set"), steps=4)
    ran = run_here(tmp_path / "run", config, stop=StopAfter(2))
    assert ran.manifest(2)["feed"]["fingerprint"]
    moved = (tmp_path / "set").rename(tmp_path / "moved")
    assert prepared(tmp_path / "set", 500)
    with pytest.raises(DataError, match="this is not the data the run began with"):
        run_here(tmp_path / "run", config)
    elsewhere = tiny(data={"source": "prepared", "path": str(moved), "wait_s": 77.0}, steps=4)
    assert run_here(tmp_path / "run", elsewhere).named("TRAINING", "start")[-1]["data"]["resumed_from"] == 2


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize("rows", ["concat", "pack"])
def test_both_kinds_of_rows_train(run_here: RunHere, tmp_path: Path, rows: str) -> None:
    ran = run_here(tmp_path / "run", tiny(data={**prepared(tmp_path / "set", 2000), "rows": rows}, steps=12))
    assert ran.losses[12] < ran.losses[1] - 0.2
    (closed, *_) = ran.named("EVAL_MODEL", "metrics")
    assert 0 < closed["data"]["loss"] < 6


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_hub_that_goes_away_is_waited_for_longer_than_any_collective(start: Start, tmp_path: Path) -> None:
    """Two ranks stream; the Hub is away for longer than the collective timeout; then one rank goes on with the rest."""
    pytest.importorskip("datasets")
    folder = tmp_path / "repo"
    folder.mkdir()
    for number in range(4):
        with gzip.open(folder / f"train-{number:05d}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts(40, start=1000 * number))

    def config(steps: int) -> TrainConfig:
        data = {"source": "hub", "dataset": "me/trees", "wait_s": 120.0}
        return tiny(data=data, steps=steps, batch_sequences=4, eval_sequences=0, epoch_steps=10**6)

    with Hub({"datasets/me/trees": folder}) as hub:
        env = {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "TRAINMASTER_COLLECTIVE_TIMEOUT_S": "6",
            "TRAINMASTER_WITNESS": str(tmp_path / "two"),
        }  # fmt: skip
        ranks = start(tmp_path / "run", config(100_000), ranks=2, env=env)
        ranks.wait_for("STEP", "metrics", step=3)
        hub.away = True  # lanes come to the end of their files every hundred steps, and then ask for the next
        log = tmp_path / "run" / "rank-0.log"
        while "waits for data since 1" not in log.read_text() and all(one.poll() is None for one in ranks.processes):
            time.sleep(0.1)
        waiting = log.read_text()
        hub.away = False
        (tmp_path / "run" / "stop").touch()
        first = ranks.finish()
        assert first.codes == [75, 75], first.output
        assert re.search(r"waits for data since 1\d s: .*rank [01] \(node 0\): .*me/trees", waiting)
        (step,) = {item["data"]["step"] for item in first.named("TRAINING", "end")}
        (tmp_path / "run" / "stop").unlink()
        second = start(
            tmp_path / "run", config(step + 3), env={**env, "TRAINMASTER_WITNESS": str(tmp_path / "one")}
        ).finish()
        assert second.codes == [0], second.output
    seen = {**sample_log.read(tmp_path / "two"), **sample_log.read(tmp_path / "one")}
    assert list(seen) == list(range(1, step + 4))
    numbers = [number for rows in seen.values() for number in rows]
    assert numbers == list(range(4 * (step + 3))), "each sample once, none left out"


def test_no_data_at_all_ends_with_65_and_a_checkpoint(start: Start, tmp_path: Path) -> None:
    config = tiny(data=prepared(tmp_path / "set", 4000, share=0.0), eval_sequences=0, steps=100_000, epoch_steps=10**6)
    ranks = start(tmp_path / "run", config)
    ranks.wait_for("STEP", "metrics", step=3)
    (shard_file,) = (tmp_path / "set").glob("train-*.tokens")
    os.truncate(shard_file, 0)
    ran: Ran = ranks.finish()
    assert ran.codes == [65] and "train-00000.tokens ends early" in ran.output[0]
    assert ran.named("CHECKPOINT", "saved")[-1]["data"]["step"] == max(ran.losses)

"""Numbers beside the events: TensorBoard's files, record by record; a tracker that fails never stops a run."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.config.watch import WatchConfig
from trainmaster.core.errors import UsageError
from trainmaster.train.metrics import tfevents, trackers
from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.run_log import RunLog

from .runs import RunHere, tiny

ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)


def records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert struct.unpack_from("<I", data, 8) == (tfevents.masked_crc(data[:8]),)
        message = data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 12 + length) == (tfevents.masked_crc(message),)
        yield message
        data = data[16 + length :]


def fields(message: bytes) -> list[tuple[int, Any]]:
    """A message of protocol buffers, by the wire format alone."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        size = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = varint() if size is None else size
        raw = message[at : at + size]
        at += size
        kind = {1: "<d", 5: "<f"}.get(key & 7)
        found.append((key >> 3, struct.unpack(kind, raw)[0] if kind else raw))
    return found


def test_the_checksum_is_castagnolis() -> None:
    # RFC 3720, appendix B.4: 32 bytes of zeros give 8A9136AA.
    crc = 0x8A9136AA
    assert tfevents.masked_crc(b"\0" * 32) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_run_writes_its_scalars_for_tensorboard(run_here: RunHere, tmp_path: Path) -> None:
    board = tmp_path / "board"
    ran = run_here(tmp_path, tiny(steps=3, epoch_steps=3, watch={"tensorboard": str(board)}))
    (file,) = board.iterdir()
    first, *events = (dict(fields(record)) for record in records(file))
    assert first[3] == b"brain.Event:2"
    found: dict[str, dict[int, float]] = {}
    for event in events:
        for number, value in fields(event[5]):
            assert number == 1
            named = dict(fields(value))
            found.setdefault(named[1].decode(), {})[event[2]] = named[2]
    assert found["train/loss"] == pytest.approx(ran.losses)
    assert set(found["eval/perplexity"]) == {3}
    assert set(found) >= {"train/lr", "train/grad_norm", "train/tokens_per_s", "train/data_share", "eval/loss"}


class Failing:
    name = "failing"

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("gone")

    def close(self) -> None:
        raise AssertionError("it was left out")


def test_a_tracker_that_fails_is_left_out_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    run_log, failing = RunLog(ALONE, None), Failing()
    run_log.track([failing])
    for step in range(3):
        run_log.evaluated(step=step, loss=1.0, perplexity=2.7)
    run_log.close()
    assert failing.calls == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "failing" in line]
    assert len(told) == 1
    assert told[0].endswith("Z WARNING [rank 0 node 0] failing is left out from here on: ConnectionError: gone")


def test_one_that_cannot_be_opened_is_told_and_the_others_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    config = WatchConfig(tensorboard=str(tmp_path / "file"))
    assert trackers.open_trackers(config, {}, said.append) == []
    assert "tensorboard could not be opened and is left out: FileExistsError" in said[0]


@pytest.mark.parametrize(
    ("field", "command"), [("wandb_project", "pip install wandb"), ("mlflow_uri", "pip install mlflow-skinny")]
)
def test_a_missing_package_is_refused_with_its_command(
    field: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=f"watch.{field} needs a package that is not installed here: {command}"):
        trackers.check_trackers(WatchConfig(**{field: "x"}))


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
@pytest.mark.spawns  # its packages ask `uname` for the machine
def test_mlflow_keeps_a_run_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    uri = (tmp_path / "runs").as_uri()
    tracker = trackers.MLflow(uri, {"model": {"layers": 2}})
    tracker.log(1, {"train/loss": 2.5})
    tracker.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("trainmaster").experiment_id])
    assert (run.data.params, run.data.metrics) == ({"model.layers": "2"}, {"train/loss": 2.5})
    for number, steps in ((1, (1, 2)), (2, (2, 3))):  # the attempts of one job go on with one run
        monkeypatch.setenv("TRAINMASTER_ATTEMPT", f"6f1c.{number}/0")
        tracker = trackers.MLflow(uri, {"model": {"layers": 2}})
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.close()
    runs = client.search_runs([run.info.experiment_id])
    assert len(runs) == 2
    (job,) = [one for one in runs if one.data.tags.get("trainmaster_job") == "6f1c"]
    assert [point.step for point in client.get_metric_history(job.info.run_id, "train/loss")] == [1, 2, 2, 3]
    assert job.info.status == "FINISHED"

"""Where a run's numbers go besides its events: TensorBoard, Weights & Biases, MLflow. All off unless configured.

Secrets are not ours to hold: both services read their keys from the environment or their own files.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainmaster.core.errors import UsageError
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.core.watch_config import WatchConfig


class Tracker(Protocol):
    """One place for numbers."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of one step, by name."""

    def close(self) -> None:
        """Everything that was logged is kept."""


def check_trackers(config: WatchConfig) -> None:
    """UsageError where one is configured whose package is not there. On every rank: they refuse together."""
    for field, package, command in (
        ("wandb_project", "wandb", "pip install wandb"),
        ("mlflow_uri", "mlflow", "pip install mlflow-skinny"),
    ):
        if getattr(config, field) is not None and importlib.util.find_spec(package) is None:
            raise UsageError(f"watch.{field} needs a package that is not installed here: {command}")


def open_trackers(config: WatchConfig, settings: Mapping[str, Any], alarm: Callable[[str], None]) -> list[Tracker]:
    """Those that the config names; `settings` is the run's config, for who shows it.

    One that cannot be opened is told and left out: training does not depend on a chart.
    """
    wanted: list[tuple[str, Callable[[], Tracker]]] = []
    if (folder := config.tensorboard) is not None:
        wanted.append(("tensorboard", lambda: TensorBoard(Path(folder))))
    if (project := config.wandb_project) is not None:
        wanted.append(("wandb", lambda: WeightsAndBiases(project, settings)))
    if (uri := config.mlflow_uri) is not None:
        wanted.append(("mlflow", lambda: MLflow(uri, settings)))
    found = []
    for name, begin in wanted:
        try:
            found.append(begin())
        except Exception as wrong:  # a foreign library, a network, a folder
            alarm(f"{name} could not be opened and is left out: {type(wrong).__name__}: {wrong}")
    return found


class TensorBoard:
    """Scalars in TensorBoard's own files, written without its package: a record is 16 bytes around one small message.

    Format: tensorflow/core/lib/io/record_writer.h (length, its checksum, data, its checksum) and
    tensorflow/core/util/event.proto (Event, Summary.Value). Only what scalars need.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # A new file for every start; TensorBoard joins those of one folder and drops what a resumed run repeats.
        self._file = (folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}").open("wb")
        self._write(_text(3, b"brain.Event:2"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = b"".join(_text(1, _text(1, name.encode()) + _float(2, value)) for name, value in numbers.items())
        self._write(_whole(2, step) + _text(5, values))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, message: bytes) -> None:
        message = _double(1, time.time()) + message
        length = struct.pack("<Q", len(message))
        parts = (length, struct.pack("<I", masked_crc(length)), message, struct.pack("<I", masked_crc(message)))
        self._file.write(b"".join(parts))


class WeightsAndBiases:
    """A run of wandb; WANDB_MODE=offline keeps it on this machine."""

    name = "wandb"

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=os.environ.get(ATTEMPT_VARIABLE), config=dict(settings))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow; file:///… keeps it in a folder."""

    name = "mlflow"

    def __init__(self, uri: str, settings: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name("trainmaster")
        number = experiment.experiment_id if experiment else self._client.create_experiment("trainmaster")
        self._run = self._client.create_run(number, run_name=os.environ.get(ATTEMPT_VARIABLE)).info.run_id
        for name, value in _flat(settings):
            self._client.log_param(self._run, name, str(value)[:500])  # longer ones are refused

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in settings.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


# Protocol buffers' wire format: a key is the field's number and how its value is written.


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _whole(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)  # Castagnoli's polynomial, reversed
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned and shifted as the record format wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

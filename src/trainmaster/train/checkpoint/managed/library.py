"""The library of managed tiered checkpointing (`amzn-sagemaker-checkpointing`), behind what we ask of it.

Its writer and reader do the work. What they are given differs in three things from what they would take themselves:
- the daemon's address, which they have no setting for;
- one tier at a time for reading: by themselves they go on in S3 in the middle of a step that memory holds in part;
- clients that hash what is written and refuse what does not come back so. By themselves they take an index that cannot
  be read for an empty one, and skip what ends too early.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

from trainmaster.core.config.managed import ManagedConfig
from trainmaster.core.errors import MissingExtra
from trainmaster.train.checkpoint.managed.record import INDEX, Part, Record

Tier = Literal["memory", "s3"]
_RECORDS_RETAINED = 8  # more than steps are: a record may outlive its parts, never the other way round
_LATEST = 16  # steps asked for; the daemon retains fewer


class TierError(Exception):
    """A tier could not be asked. Says nothing about what it holds."""


class Library:
    """The library, set up for one run and its number of ranks."""

    def __init__(self, config: ManagedConfig, *, rank: int, ranks: int) -> None:
        try:
            from amzn_sagemaker_checkpointing.checkpointing.filesystem import filesystem
            from amzn_sagemaker_checkpointing.config import (
                in_memory_client,
                s3_path_strategy,
                sagemaker_checkpoint_config,
            )
            from amzn_sagemaker_checkpointing.storage.clients.inmemory import checksum, inmemory_client
        except ImportError as missing:
            raise MissingExtra(f"checkpoint.managed ({missing})", "hyperpod") from missing
        self._filesystem, self._clients, self._checksum = filesystem, inmemory_client, checksum
        self._settings = sagemaker_checkpoint_config.SageMakerCheckpointConfig
        self._config, self._rank, self._ranks = config, rank, ranks
        address = in_memory_client.InMemoryClientConfig(request_timeout=config.timeout_s)
        if config.daemon is not None:
            address.base_url = config.daemon.rstrip("/")
        self._address = address
        self.daemon: str = address.base_url
        # Named, because it would take another layout by itself wherever Ray is installed.
        self._paths = s3_path_strategy.DefaultS3PathStrategy(f"{config.s3.rstrip('/')}/{config.namespace}")
        # It logs to a file of its own in /var/log; what matters to the run is said by us.
        self._logger = logging.getLogger("trainmaster.checkpoint.managed")
        self._logger.propagate = False

    @property
    def namespace(self) -> str:
        """Namespace of this number of ranks. The daemon takes the number only when it creates a namespace."""
        return f"{self._config.namespace}-{self._ranks}r"

    def writer(self, step: int, *, to_s3: bool) -> tuple[Any, WrittenParts]:
        """A writer for this rank's part of a step, and what it will have written. May ask S3, which takes its time."""
        # Without the S3 path for memory alone: it would ask S3 for the bucket's region, and fail where that is away.
        settings = self._settings(
            namespace=self.namespace,
            world_size=self._ranks,
            s3_path_strategy=self._paths if to_s3 else None,
            save_to_s3=to_s3,
            logger=self._logger,
        )
        writer: Any = self._filesystem.SageMakerTieredStorageWriter(checkpoint_config=settings, step=step)
        written = WrittenParts(self._client(self.namespace, self._ranks), self.measure)
        writer.client = written
        return writer, written

    def reader(self, record: Record, tier: Tier) -> tuple[Any, list[str]]:
        """A reader of that step from that tier alone, and what it will have found wrong."""
        faults: list[str] = []
        settings = self._settings(
            namespace=record.namespace,
            world_size=record.ranks,  # of the writers: the index lies behind their shards
            s3_path_strategy=self._paths if tier == "s3" else None,
            logger=self._logger,
        )
        reader: Any = self._filesystem.SageMakerTieredStorageReader(checkpoint_config=settings, step=record.step)
        if tier == "memory":
            client = self._client(record.namespace, record.ranks)
            reader.client = CheckedMemory(client, record, self.measure, faults)
        else:
            reader.client = EmptyMemory()
            reader.s3_client = CheckedS3(reader.s3_client, self.s3_parts(record), self.measure, faults)
        return reader, faults

    def s3_parts(self, record: Record) -> dict[str, Part]:
        """The parts of a step by their S3 URLs."""
        place = record.namespace, record.step
        shards = {
            self._paths.get_s3_uri(place[0], rank, place[1], "checkpoint.pt"): record.parts[str(rank)]
            for rank in range(record.ranks)
        }
        return {**shards, self._paths.get_s3_uri(place[0], 0, place[1], "metadata.metadata"): record.parts[INDEX]}

    def measure(self, data: bytes) -> Part:
        return Part(size_bytes=len(data), xxh3_128=self._checksum.hash_xxh3_128(data).hex())

    def list_steps(self, namespace: str) -> list[int]:
        """Steps the daemon has something of, newest first. Asked by ourselves: the library takes an error for none."""
        url = f"{self.daemon}/v1/cp/checkpoints/{namespace}/latest?limit={_LATEST}"
        try:
            with urllib.request.urlopen(url, timeout=self._config.timeout_s) as answer:  # noqa: S310 (the config's own)
                return sorted((int(step) for step in json.load(answer)), reverse=True)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return []
                raise TierError(f"the memory daemon at {self.daemon} answers with {error.code}") from None
        except (OSError, ValueError, TypeError) as error:
            raise TierError(f"the memory daemon at {self.daemon} does not answer: {error}") from None

    def read_record(self, step: int) -> bytes | None:
        """The record of a step from the daemon, or None where it has none."""
        text: bytes | None = self._request(lambda client: client.get_checkpoint(step, rank=0))
        return text

    def write_record(self, step: int, text: bytes) -> None:
        def put(client: Any) -> None:
            client.get_or_create_namespace()
            client.put_checkpoint(step, text, rank=0)

        self._request(put)

    @property
    def records(self) -> str:
        """The namespace of the records: one for all numbers of ranks, so that any number finds them."""
        return f"{self._config.namespace}-records"

    def _request(self, action: Callable[[Any], Any]) -> Any:
        client = self._client(self.records, 1, steps_retained=_RECORDS_RETAINED, metadata_file_count=0)
        try:
            return action(client)
        except Exception as error:  # the library raises what it likes, KeyError for a missing header among it
            raise TierError(f"the memory daemon at {self.daemon}: {_words(error)}") from error
        finally:
            client.close()

    def _client(self, namespace: str, ranks: int, **more: int) -> Any:
        return self._clients.InMemoryCheckpointClient(
            namespace=namespace,
            rank=str(self._rank),
            world_size=str(ranks),
            config=self._address,
            logger=self._logger,
            **more,
        )


class Measure(Protocol):
    def __call__(self, data: bytes) -> Part: ...


class WrittenParts:
    """The memory client of a writer, noting what goes through it. S3 gets the same bytes."""

    def __init__(self, client: Any, measure: Measure) -> None:
        self._client, self._measure = client, measure
        self.parts: dict[str, Part] = {}
        self.refused: list[str] = []  # what the daemon did not take

    def get_or_create_namespace(self) -> None:
        self._client.get_or_create_namespace()

    def put_checkpoint(
        self, step: int, data: bytes, metadata_index: int | None = None, rank: int | None = None
    ) -> None:
        self.parts[INDEX if metadata_index is not None else str(rank)] = self._measure(data)
        try:
            self._client.put_checkpoint(step=step, data=data, metadata_index=metadata_index, rank=rank)
        except Exception as error:
            self.refused.append(_words(error))
            raise

    def close(self) -> None:
        self._client.close()


class CheckedMemory:
    """The memory client of a reader: a part that is missing or differs from its record is an error."""

    def __init__(self, client: Any, record: Record, measure: Measure, faults: list[str]) -> None:
        self._client, self._record, self._measure, self._faults = client, record, measure, faults

    def get_checkpoint(self, step: int, metadata_index: int | None = None, rank: int | None = None) -> bytes:
        name = INDEX if metadata_index is not None else str(rank)
        with _noted(self._faults):
            data: bytes | None = self._client.get_checkpoint(step=step, metadata_index=metadata_index, rank=rank)
            if data is None:
                raise TierError(f"{_named(name)} is not in the daemon's memory")
            _must_be(name, self._measure(data), self._record.parts[name])
            return data


class EmptyMemory:
    """The memory client of a reader that is to read S3."""

    def get_checkpoint(self, **_: object) -> None:
        return None


class CheckedS3:
    """The S3 client of a reader: an object is handed on after its hash was seen to be right."""

    def __init__(self, client: Any, parts: dict[str, Part], measure: Measure, faults: list[str]) -> None:
        self._client, self._parts, self._measure, self._faults = client, parts, measure, faults

    @contextlib.contextmanager
    def create_read_stream(self, s3_uri: str) -> Iterator[io.BytesIO]:
        with _noted(self._faults):
            with self._client.create_read_stream(s3_uri) as stream:
                data = stream.read()
            _must_be(s3_uri, self._measure(data), self._parts[s3_uri])
        yield io.BytesIO(data)


def _must_be(name: str, actual: Part, expected: Part) -> None:
    if actual.size_bytes != expected.size_bytes:
        raise TierError(f"{_named(name)} has {actual.size_bytes} bytes instead of {expected.size_bytes}")
    if actual != expected:
        raise TierError(f"{_named(name)} does not match its checksum")


def _named(name: str) -> str:
    return f"the part of rank {name}" if name.isdigit() else name


@contextlib.contextmanager
def _noted(faults: list[str]) -> Iterator[None]:
    """Keep the words of an error: the library drops them on the way up."""
    try:
        yield
    except Exception as error:
        faults.append(_words(error))
        raise


def _words(error: BaseException) -> str:
    """The error with its cause: the library's own text is "Connection error" alone."""
    text = str(error) if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
    return f"{text} ({error.__cause__})" if error.__cause__ is not None else text

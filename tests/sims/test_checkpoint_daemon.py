"""The stand-in of the memory daemon, asked by the real client of `amzn-sagemaker-checkpointing`."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
from amzn_sagemaker_checkpointing.storage.clients.inmemory.exceptions import (
    InMemoryClientError,
    InMemoryConnectionError,
    InMemoryRequestError,
    InMemoryServerError,
    InMemoryStorageError,
)
from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient

from sims.checkpoint_daemon import Daemon, Faults


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(limit_bytes=1000) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Any]:
    config = InMemoryClientConfig(base_url=daemon.url, request_timeout=0.5)
    client = InMemoryCheckpointClient(namespace="run", rank="0", world_size="2", config=config)
    yield client
    client.close()


def test_shards_come_back_as_they_were_and_old_steps_go(daemon: Daemon, client: Any) -> None:
    assert client.get_namespace_config() == {}
    assert client.get_or_create_namespace() == {"namespace": "run", "num_ranks": 3, "steps_retained": 3}
    for step in (10, 20, 30, 40):
        client.put_checkpoint(step, f"bytes of {step}".encode(), rank=1)
    client.put_checkpoint(40, b"the index", metadata_index=0)
    assert client.get_checkpoint(40, rank=1) == b"bytes of 40"
    assert client.get_checkpoint(40, metadata_index=0) == b"the index"
    assert client.get_checkpoint(10, rank=1) is None
    assert client.get_latest_checkpoints(limit=2) == [40, 30]
    assert daemon.memory.held() == {"run": {20: [1], 30: [1], 40: [1, 2]}}
    client.delete_checkpoint(40, rank=1)
    assert client.get_checkpoint(40, rank=1) is None
    client.delete_namespace()
    assert daemon.memory.held() == {}


def test_it_refuses_what_a_namespace_has_no_room_for(client: Any) -> None:
    with pytest.raises(InMemoryStorageError):
        client.put_checkpoint(1, b"no namespace yet", rank=0)
    client.get_or_create_namespace()
    with pytest.raises(InMemoryClientError, match="rank 3 of a namespace of 3"):
        client.put_checkpoint(1, b"x", rank=3)
    with pytest.raises(InMemoryServerError, match="memory is full"):
        client.put_checkpoint(1, b"x" * 1001, rank=0)


def test_its_faults(daemon: Daemon, client: Any) -> None:
    client.get_or_create_namespace()
    client.put_checkpoint(5, b"kept", rank=0)
    daemon.faults = Faults(status=503, only="/0/5", method="GET")
    with pytest.raises(InMemoryRequestError):
        client.get_checkpoint(5, rank=0)
    client.put_checkpoint(5, b"kept still", rank=0)
    daemon.faults = Faults(mute=True)
    with pytest.raises(InMemoryConnectionError):
        client.get_checkpoint(5, rank=0)
    daemon.faults = Faults(slow_s=1)
    with pytest.raises(InMemoryConnectionError):
        client.get_checkpoint(5, rank=0)
    daemon.faults = Faults()
    assert client.get_checkpoint(5, rank=0) == b"kept still"
    daemon.memory.flip("run", 0, 5)
    assert client.get_checkpoint(5, rank=0) not in (None, b"kept still")
    daemon.memory.lose()
    assert client.get_checkpoint(5, rank=0) is None


def test_it_starts_from_a_shell_and_takes_faults_over_http() -> None:
    command = [sys.executable, "-m", "sims.checkpoint_daemon", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            config = InMemoryClientConfig(base_url=url)
            client = InMemoryCheckpointClient(namespace="run", rank="0", world_size="1", config=config)
            client.get_or_create_namespace()
            urllib.request.urlopen(f"{url}/sim", json.dumps({"status": 500}).encode()).close()
            with pytest.raises(InMemoryRequestError):
                client.get_checkpoint(1)
            urllib.request.urlopen(f"{url}/sim", b"{}").close()
            urllib.request.urlopen(f"{url}/sim/lose", b"").close()
            assert client.get_namespace_config() == {}
            client.close()
        finally:
            server.kill()

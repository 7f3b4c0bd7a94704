"""Slices of a file that is loaded: every byte in its place and in the hash, however tensors lie in the slices."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch

from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint.read import Slices


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("hashing", [True, False])
def test_what_is_taken_is_what_is_there_and_all_of_it_is_hashed(tmp_path: Path, seed: int, *, hashing: bool) -> None:
    dice = random.Random(seed)
    content = dice.randbytes(dice.randint(1, 5000))
    path = tmp_path / "shard"
    path.write_bytes(content)
    digest, at = hashlib.sha256() if hashing else None, 0
    with path.open("rb", buffering=0) as file:
        slices = Slices(file, digest, gpu=None, size_bytes=64)
        while at < len(content):
            wanted = min(dice.choice((1, 7, 63, 64, 65, 200)), len(content) - at)
            if dice.random() < 0.5:
                flat = torch.zeros(wanted, dtype=torch.uint8)
                slices.fill(flat)
                read = bytes(flat.tolist())
            else:
                read = bytes(slices.next(wanted).tolist())
            assert read == content[at : at + len(read)] and 1 <= len(read) <= wanted
            at += len(read)
            assert hashing or file.tell() == at, "a file that is not hashed is not read ahead"
        with pytest.raises(CheckpointError, match="shard ends too early"):
            slices.next(1)
    assert digest is None or digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_bytes_stay_while_the_next_slice_is_read(tmp_path: Path) -> None:
    """A GPU may still copy from the slice before."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(192)))
    with path.open("rb", buffering=0) as file:
        slices = Slices(file, hashlib.sha256(), gpu=None, size_bytes=64)
        first = slices.next(64)
        slices.next(64)
        assert first.tolist() == list(range(64))

"""Reader of one split of a prepared folder: any range of its tokens, across shards."""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from trainmaster.core.errors import DataError
from trainmaster.datasets.corpus.index import LENGTH_BYTES, WIDTHS, Shard

_DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}
_OPEN_FILES = 256  # many systems let a process have 1,024


class Tokens:
    """Tokens of several shards as one sequence.

    Read with pread, not through a memory map: a disk or a network file system that fails then gives an error that can
    be retried, where a map would kill the process.
    """

    def __init__(self, folder: Path, shards: tuple[Shard, ...], dtype: str) -> None:
        self._paths = [folder / shard.tokens_file.name for shard in shards]
        self._dtype, self._width = _DTYPES[dtype], WIDTHS[dtype]
        self._most = [shard.max_token for shard in shards]
        self.starts = [0]  # the first token of each shard, and the end of all
        for shard in shards:
            self.starts.append(self.starts[-1] + shard.tokens)
        self._files: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, first: int, count: int) -> Tensor:
        """`count` tokens from number `first` on, as int64."""
        pieces = []
        shard = bisect.bisect_right(self.starts, first) - 1
        while count:
            here = min(count, self.starts[shard + 1] - first)
            pieces.append(self._piece(shard, first - self.starts[shard], here))
            first, count, shard = first + here, count - here, shard + 1
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _piece(self, shard: int, first: int, count: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=torch.int64)
        buffer = bytearray(count * self._width)
        view, done = memoryview(buffer), 0
        while done < len(buffer):  # a read may end early, at a signal or on a network file system
            try:
                count_read = os.preadv(self._open(shard), [view[done:]], first * self._width + done)
            except OSError as error:
                self._shut(shard)  # a handle that went stale is no use for the next try
                raise OSError(error.errno, error.strerror, str(self._paths[shard])) from error
            if count_read == 0:
                raise DataError(f"{self._paths[shard]} ends early; run `trainmaster data validate` on its folder")
            done += count_read
        tokens = torch.frombuffer(buffer, dtype=self._dtype).to(torch.int64)
        if int(tokens.max()) > self._most[shard]:
            # A model would end on it with an error that names neither file nor cause.
            raise DataError(
                f"{self._paths[shard]} is damaged: token {int(tokens.max())}, and its index knows none above "
                f"{self._most[shard]}; run `trainmaster data validate` on its folder"
            )
        return tokens

    def _shut(self, shard: int) -> None:
        fd = self._files.pop(shard, None)
        if fd is not None:
            os.close(fd)

    def _open(self, shard: int) -> int:
        fd = self._files.pop(shard, None)
        if fd is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            fd = os.open(self._paths[shard], os.O_RDONLY)
        self._files[shard] = fd
        return fd


def read_lengths(folder: Path, shard: Shard) -> Tensor:
    """Token count of each document of a shard, as int64; DataError where they are not those of its tokens."""
    path = folder / shard.lengths_file.name
    raw = bytearray(path.read_bytes())
    if len(raw) != shard.documents * LENGTH_BYTES:
        raise DataError(
            f"{path} has {len(raw)} bytes instead of {shard.documents * LENGTH_BYTES}; prepare the data again"
        )
    lengths = torch.frombuffer(raw, dtype=torch.uint32).to(torch.int64) if raw else torch.empty(0, dtype=torch.int64)
    if (total := int(lengths.sum())) != shard.tokens:
        # A row would be read from beyond the last token.
        raise DataError(
            f"{path} is damaged: its documents have {total} tokens, and the shard {shard.tokens}; prepare the data "
            "again"
        )
    return lengths

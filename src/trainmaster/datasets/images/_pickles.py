"""Pickled CIFAR batches, read without running code that a file names.

The published files are pickles of Python 2 with arrays of numpy. A pickle may call any function, so only five names are
let through, and each stands for a class of this module: data is copied, and nothing is imported.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

_MODULES = {"numpy.core.multiarray", "numpy._core.multiarray", "numpy", "_codecs"}


class NotPlain(Exception):
    """A pickle with anything else than dicts, lists, strings, numbers and arrays of bytes."""


class ByteArray:
    """An array of unsigned bytes: shape and content."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.data = b""

    def __setstate__(self, state: Any) -> None:
        try:
            _, self.shape, dtype, fortran, self.data = state
        except (TypeError, ValueError):
            raise NotPlain("an array in an unknown form") from None
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1", b"u1", b"|u1") or fortran:
            raise NotPlain("an array that does not hold unsigned bytes row by row")
        size = 1
        for count in self.shape if isinstance(self.shape, tuple) else (None,):
            if not isinstance(count, int) or count < 0:
                raise NotPlain("an array with a wrong shape")
            size *= count
        if not isinstance(self.data, bytes) or len(self.data) != size:
            raise NotPlain("an array whose content does not have the size of its shape")


class _Dtype:
    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code

    def __setstate__(self, _: Any) -> None:
        pass


class _NdArray:
    """The word `numpy.ndarray`, an argument of `_reconstruct`."""


def load(data: bytes) -> Any:
    """The content of a pickle; NotPlain where it holds or does anything else than data."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except NotPlain:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise NotPlain(f"{type(error).__name__}: {error}") from None


def _reconstruct(*_: Any) -> ByteArray:
    return ByteArray()


def _encode(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    """Bytes in a pickle that Python 3 wrote with protocol 2."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise NotPlain("a string in an unknown encoding")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct": _reconstruct, "ndarray": _NdArray, "dtype": _Dtype, "encode": _encode}
        if module not in _MODULES or name not in allowed or (module == "_codecs") != (name == "encode"):
            raise NotPlain(f"it wants to call {module}.{name}")
        return allowed[name]

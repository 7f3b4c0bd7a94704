"""A store in a local folder: an object is a file. Needs nothing but the standard library."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from trainmaster.core.errors import AccessDenied, NoSignedUrls, ObjectMissing, StorageError
from trainmaster.core.files import DRAFT_PREFIX, is_hole, open_whole, write_whole
from trainmaster.storage.contract import Stored, check_expiry, check_path


class FolderStore:
    """Objects as files under one folder, which is made on the first write."""

    def __init__(self, folder: Path) -> None:
        self._root = folder.expanduser().absolute()
        self.url = str(self._root)

    def put(self, path: str, data: bytes | Path | Iterator[bytes]) -> None:
        place = self._place(path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open_whole(place, durable=True) as out:
                if isinstance(data, Path):
                    with data.open("rb") as source:
                        shutil.copyfileobj(source, out, 1 << 20)
                elif isinstance(data, bytes):
                    out.write(data)
                else:
                    _write_sparse(out, data)
        except OSError as error:
            raise _error(f"{place} cannot be written", error) from None

    def put_new(self, path: str, data: bytes) -> bool:
        place = self._place(path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            # A hard link: atomic on NFS too, where O_EXCL has not always been.
            write_whole(place, data, durable=True, replace=False)
        except FileExistsError:
            return False
        except OSError as error:
            raise _error(f"{place} cannot be written", error) from None
        return True

    def get(self, path: str) -> bytes:
        place = self._place(path)
        try:
            return place.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissing(f"there is no {path} in {self._root}") from None
        except OSError as error:
            raise _error(f"{place} cannot be read", error) from None

    def read(self, path: str, *, start: int, size: int) -> bytes:
        place = self._place(path)
        try:
            with place.open("rb") as file:
                if is_hole(file.fileno(), start, size):
                    return bytes(size)
                file.seek(start)
                data = file.read(size)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissing(f"there is no {path} in {self._root}") from None
        except OSError as error:
            raise _error(f"{place} cannot be read", error) from None
        if len(data) != size:
            raise StorageError(f"{place} ends before byte {start + size}")
        return data

    def list(self, prefix: str = "") -> list[Stored]:
        start = self._place(prefix.rstrip("/")) if prefix.rstrip("/") else self._root
        try:
            files = [path for path in start.rglob("*") if path.is_file() and not path.name.startswith(DRAFT_PREFIX)]
            objects = [
                Stored(path=place.relative_to(self._root).as_posix(), size_bytes=place.stat().st_size)
                for place in files
            ]
        except OSError as error:
            raise _error(f"{start} cannot be listed", error) from None
        return sorted(objects, key=lambda item: item.path)

    def delete(self, path: str) -> None:
        place = self._place(path)
        try:
            place.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise _error(f"{place} cannot be removed", error) from None

    def exists(self, path: str) -> bool:
        place = self._place(path)
        try:
            place.lstat()
            return place.is_file()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _error(f"cannot tell whether {place} is there", error) from None

    def stat(self, path: str) -> Stored:
        place = self._place(path)
        try:
            facts = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(f"there is no {path} in {self._root}") from None
        except OSError as error:
            raise _error(f"{place} cannot be looked at", error) from None
        if not place.is_file():
            raise ObjectMissing(f"there is no {path} in {self._root}")
        # Every put makes a new file: the number of a removed one may come again, its time of writing does not.
        version = f"{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_size}"
        return Stored(path=path, size_bytes=facts.st_size, version=version)

    def sign(self, path: str, *, method: Literal["GET", "PUT"] = "GET", expires_s: int = 3600) -> str:
        check_expiry(expires_s)
        raise NoSignedUrls(f"{method} {self._place(path)}: a folder has no URLs; use s3://, or read through the server")

    def _place(self, path: str) -> Path:
        place = self._root / check_path(path)
        # A link inside the folder may lead out of it, and a store never touches what is outside.
        if not place.resolve().is_relative_to(self._root.resolve()):
            raise StorageError(f"{place} leads out of {self._root}")
        return place


def _write_sparse(out: BinaryIO, pieces: Iterator[bytes]) -> None:
    """Write pieces; one of zeros alone becomes a hole. A job's sparse file must not fill the disk of the server."""
    for piece in pieces:
        if piece[:1] == b"\x00" and piece == bytes(len(piece)):
            out.seek(len(piece), os.SEEK_CUR)
        else:
            out.write(piece)
    out.truncate()  # a hole at the end counts too


def _error(what: str, error: OSError) -> StorageError:
    kind = AccessDenied if isinstance(error, PermissionError) else StorageError
    return kind(f"{what}: {error.strerror or error}")

"""A store in S3 (or MinIO, SeaweedFS, …), Google Cloud Storage or Azure, through obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainmaster.core.errors import AccessDenied, MissingExtra, ObjectMissing, StorageError, StorageUnreachable
from trainmaster.storage.contract import Stored, check_expiry, check_path

T = TypeVar("T")
# obstore's own default waits minutes for a server that is not there; a person is waiting for ours.
_RETRY = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
_CONNECT_TIMEOUT = "5s"
# Texts of object_store 0.12 and reqwest: no answer, and no credentials.
_NO_ANSWER = re.compile(r"error sending request|connect|dns|timed? ?out|timeout", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(r"169\.254\.|metadata\.google|credential|token|account.*key", re.IGNORECASE)
_REFUSED = re.compile(r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|\b40[13] ")
# S3 takes an object in at most 10,000 parts of at least 5 MiB; what is on its way at a time is held in memory.
_PART, _PARTS, _AT_ONCE = 8 << 20, 10_000, 4


class ObjectStore:
    """Objects under one prefix of one bucket."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            from obstore import store
        except ModuleNotFoundError as missing:
            raise MissingExtra(f"{url.partition(':')[0]}:// storage", "storage") from missing
        client: dict[str, Any] = {"connect_timeout": _CONNECT_TIMEOUT}
        config: dict[str, Any] = {}
        if url.startswith("s3://"):
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if endpoint:
                config["endpoint"] = endpoint
                client["allow_http"] = endpoint.startswith("http://")
            if not os.environ.get("AWS_REGION") and not os.environ.get("AWS_DEFAULT_REGION"):
                config["region"] = "us-east-1"  # a signature needs one; servers of one's own accept any
        self._store: Any = self._run(
            lambda: store.from_url(url, config=config or None, client_options=client, retry_config=_RETRY)  # type: ignore[call-overload]
        )

    def put(self, path: str, data: bytes | Path | Iterator[bytes]) -> None:
        check_path(path)
        if isinstance(data, Path) and not data.is_file():
            raise StorageError(f"{data} is no file that could be put into {self.url}")
        # What is larger than one part goes up in parts, and becomes an object when the last of them is there. Pieces
        # do not say how many they are: more than 80 GiB are put as a file.
        part = part_bytes(data.stat().st_size) if isinstance(data, Path) else _PART
        self._run(lambda: self._store.put(path, data, chunk_size=part, max_concurrency=_AT_ONCE), path)

    def put_new(self, path: str, data: bytes) -> bool:
        from obstore import exceptions

        check_path(path)

        def put() -> bool:
            try:
                # One request with a condition (If-None-Match on S3): parts could not carry it.
                self._store.put(path, data, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError:
                return False
            return True

        return self._run(put, path)

    def get(self, path: str) -> bytes:
        check_path(path)
        return bytes(self._run(lambda: self._store.get(path).bytes(), path))

    def read(self, path: str, *, start: int, size: int) -> bytes:
        check_path(path)
        if size == 0:
            return b""  # HTTP has no word for an empty range
        data = bytes(self._run(lambda: self._store.get_range(path, start=start, length=size), path))
        if len(data) != size:
            raise StorageError(f"{self.url}/{path} ends before byte {start + size}")
        return data

    def list(self, prefix: str = "") -> list[Stored]:
        under = check_path(prefix.rstrip("/")) if prefix.rstrip("/") else None
        rows = self._run(lambda: self._store.list(prefix=under).collect())
        return sorted((Stored(path=row["path"], size_bytes=row["size"]) for row in rows), key=lambda item: item.path)

    def delete(self, path: str) -> None:
        check_path(path)
        try:
            self._run(lambda: self._store.delete(path), path)
        except ObjectMissing:
            return

    def exists(self, path: str) -> bool:
        check_path(path)
        try:
            self._run(lambda: self._store.head(path), path)
        except ObjectMissing:
            return False
        return True

    def stat(self, path: str) -> Stored:
        check_path(path)
        facts = self._run(lambda: self._store.head(path), path)
        # Where a server has no tag, the time: to the second on S3, which is better than nothing.
        return Stored(path=path, size_bytes=facts["size"], version=facts["e_tag"] or str(facts["last_modified"]))

    def sign(self, path: str, *, method: Literal["GET", "PUT"] = "GET", expires_s: int = 3600) -> str:
        import obstore

        check_path(path)
        good_for = timedelta(seconds=check_expiry(expires_s))
        return str(self._run(lambda: obstore.sign(self._store, method, path, good_for), path))

    def _run(self, request: Callable[[], T], path: str = "") -> T:
        from obstore import exceptions

        where = f"{self.url}/{path}".rstrip("/")
        try:
            return request()
        except (exceptions.NotFoundError, FileNotFoundError):
            raise ObjectMissing(f"there is no {where}") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise _denied(where, str(error)) from None
        except exceptions.BaseError as error:
            message = str(error)
            if _REFUSED.search(message) or _NO_CREDENTIALS.search(message):
                raise _denied(where, message) from None
            if _NO_ANSWER.search(message):
                raise StorageUnreachable(
                    f"{where}: no answer; look at the network and AWS_ENDPOINT_URL ({_short(message)})"
                ) from None
            raise StorageError(f"{where}: {_short(message)}") from None


def part_bytes(size: int) -> int:
    """How large the parts of an object of this size must be, so that they are not too many."""
    return max(_PART, -(-size // _PARTS))


def _denied(where: str, message: str) -> AccessDenied:
    return AccessDenied(f"{where}: credentials in the environment are missing, wrong or not enough ({_short(message)})")


def _short(message: str) -> str:
    """The server's own word, else the first line: the rest is the library's insides and whole requests."""
    code = re.search(r"<Code>(\w+)</Code>", message)
    return code[1] if code else " ".join(message.partition("\n")[0].split())[:200]

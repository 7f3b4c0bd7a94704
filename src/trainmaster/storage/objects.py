"""A store in S3 (or MinIO, SeaweedFS, …), Google Cloud Storage or Azure, through obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from trainmaster.core.errors import AccessDenied, MissingExtra, ObjectMissing, StorageError, StorageUnreachable
from trainmaster.storage import Stored, check_path

T = TypeVar("T")
# obstore's own default waits minutes for a server that is not there; a person is waiting for ours.
_RETRY = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
_CONNECT_TIMEOUT = "5s"
# What it says (object_store 0.12 and reqwest) when nothing answered, and when nobody would say who we are.
_NO_ANSWER = re.compile(r"error sending request|connect|dns|timed? ?out|timeout", re.IGNORECASE)
_NO_CREDENTIALS = re.compile(r"169\.254\.|metadata\.google|credential|token|account.*key", re.IGNORECASE)
_REFUSED = re.compile(r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|\b40[13] ")


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
        self._store: Any = self._ask(
            lambda: store.from_url(url, config=config or None, client_options=client, retry_config=_RETRY)  # type: ignore[call-overload]
        )

    def put(self, path: str, data: bytes | Path) -> None:
        check_path(path)
        if isinstance(data, Path) and not data.is_file():
            raise StorageError(f"{data} is no file that could be put into {self.url}")
        self._ask(lambda: self._store.put(path, data), path)

    def get(self, path: str) -> bytes:
        check_path(path)
        return bytes(self._ask(lambda: self._store.get(path).bytes(), path))

    def list(self, prefix: str = "") -> list[Stored]:
        under = check_path(prefix.rstrip("/")) if prefix.rstrip("/") else None
        rows = self._ask(lambda: self._store.list(prefix=under).collect())
        return sorted((Stored(path=row["path"], size_bytes=row["size"]) for row in rows), key=lambda item: item.path)

    def delete(self, path: str) -> None:
        check_path(path)
        try:
            self._ask(lambda: self._store.delete(path), path)
        except ObjectMissing:
            return

    def exists(self, path: str) -> bool:
        check_path(path)
        try:
            self._ask(lambda: self._store.head(path), path)
        except ObjectMissing:
            return False
        return True

    def _ask(self, question: Callable[[], T], path: str = "") -> T:
        from obstore import exceptions

        where = f"{self.url}/{path}".rstrip("/")
        try:
            return question()
        except (exceptions.NotFoundError, FileNotFoundError):
            raise ObjectMissing(f"there is no {where}") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as wrong:
            raise _denied(where, str(wrong)) from None
        except exceptions.BaseError as wrong:
            said = str(wrong)
            if _REFUSED.search(said) or _NO_CREDENTIALS.search(said):
                raise _denied(where, said) from None
            if _NO_ANSWER.search(said):
                raise StorageUnreachable(
                    f"{where}: no answer; look at the network and AWS_ENDPOINT_URL ({_short(said)})"
                ) from None
            raise StorageError(f"{where}: {_short(said)}") from None


def _denied(where: str, said: str) -> AccessDenied:
    return AccessDenied(f"{where}: credentials in the environment are missing, wrong or not enough ({_short(said)})")


def _short(said: str) -> str:
    """The server's own word, else the first line: the rest is the library's insides and whole requests."""
    code = re.search(r"<Code>(\w+)</Code>", said)
    return code[1] if code else " ".join(said.partition("\n")[0].split())[:200]

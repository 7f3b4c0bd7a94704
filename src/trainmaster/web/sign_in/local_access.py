"""Access of the server's own Unix user: a token in a file with mode 0600, and a one-time link for the browser.

Loopback alone proves nothing: every account of the machine can connect to it. The file proves the account, because only
its owner can read it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import threading
from pathlib import Path

from trainmaster.core.errors import UsageError
from trainmaster.core.files import write_whole
from trainmaster.store import tokens

FILE = "local.token"  # in the home folder


class LocalAccess:
    """The token of the server's own user, and a link that logs a browser in once. Threads may share it."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._code: str | None = secrets.token_urlsafe(32)
        self._lock = threading.Lock()

    @property
    def link(self) -> str:
        """The path of the one-time link."""
        return f"/enter/{self._code}"

    def owns(self, token: str) -> bool:
        """Whether this is the token of the file."""
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def redeem(self, code: str) -> bool:
        """Use up the one-time code; False where it is wrong or was used."""
        with self._lock:
            right = self._code is not None and hmac.compare_digest(code.encode(errors="replace"), self._code.encode())
            if right:
                self._code = None
            return right


def open_local_access(home: Path) -> LocalAccess:
    """The token of a home folder, created where there is none. One that others could have read is replaced."""
    path = home / FILE
    token = _read(path)
    if token is None:
        token = f"tm_{secrets.token_urlsafe(32)}"
        try:
            write_whole(path, token + "\n", durable=True, mode=0o600)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
    return LocalAccess(token)


def _read(path: Path) -> str | None:
    """A token that only its owner could read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(fd) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
            return None
        token = file.read(200).strip()
    return token if tokens.SHAPE.fullmatch(token) else None

"""Files that a working folder must not carry to a server: keys and tokens, by their names or by their first bytes.

Nothing but these patterns counts: a long hexadecimal word, such as a commit, is no secret.
"""

from __future__ import annotations

import re

# As rules of .gitignore.
KEY_NAMES = (
    ".env", ".env.*", ".netrc", ".ssh/", ".aws/", ".kube/", ".gnupg/", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*.pem", "*.key", "*.ppk", "*.p12", "*.pfx",
)  # fmt: skip
_HEAD_BYTES = 4096  # a key begins with its header, perhaps below a few lines of text
_MOST_BYTES = 64 << 10  # a file of a token is small; a log or a data file of megabytes is not searched
_PRIVATE_KEY = re.compile(rb"^-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----", re.MULTILINE)
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_-])tm_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")  # as store/tokens.py makes them


def find_secret(data: bytes, size_bytes: int) -> str | None:
    """What secret a file holds, by its first bytes; None: none of those that are known."""
    # The plain words first: with the patterns alone a folder of 10,000 files takes three times as long.
    if data.find(b" PRIVATE KEY", 0, _HEAD_BYTES) >= 0 and _PRIVATE_KEY.search(data, 0, _HEAD_BYTES):
        return "a private key"
    if size_bytes <= _MOST_BYTES and b"tm_" in data and _TOKEN.search(data):
        return "a Trainmaster token"
    return None

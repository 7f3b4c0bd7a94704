"""What the node half uses of Python 3.11, for machines that have 3.10 (Ubuntu 22.04, as Lambda's images).

The control half needs 3.11 and imports these from the standard library.
"""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):  # noqa: UP036 (a node may have 3.10)
    from datetime import UTC, datetime
    from enum import StrEnum
    from hashlib import file_digest

    parse_iso_time = datetime.fromisoformat

    def read_toml(text: str) -> dict[str, Any]:
        """What a TOML file says."""
        import tomllib  # few programs read one

        return tomllib.loads(text)

else:
    import hashlib
    import re
    from datetime import datetime, timezone
    from enum import Enum
    from typing import BinaryIO

    from trainmaster.core.compat.toml_subset import read_toml

    UTC = timezone.utc  # noqa: UP017

    class StrEnum(str, Enum):  # noqa: UP042
        """An enum whose members are text, and print as it."""

        __str__ = str.__str__
        __format__ = str.__format__

        @staticmethod
        def _generate_next_value_(name: str, *_: object) -> str:
            return name.lower()

    def file_digest(file: BinaryIO, name: str) -> Any:
        """The hash of a file, read in pieces."""
        digest = hashlib.new(name)
        while piece := file.read(1 << 18):
            digest.update(piece)
        return digest

    def parse_iso_time(text: str) -> datetime:
        """A time as 3.11 reads it: `Z`, offsets without a colon, and any number of digits after the point."""
        text = re.sub(r"Z$", "+00:00", text)
        text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text) if "T" in text or " " in text else text
        text = re.sub(r"[.,](\d+)", lambda match: "." + match[1][:6].ljust(6, "0"), text)
        return datetime.fromisoformat(text)


__all__ = ["UTC", "StrEnum", "file_digest", "parse_iso_time", "read_toml"]

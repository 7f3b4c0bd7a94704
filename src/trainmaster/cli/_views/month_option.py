"""The option `--month` of the verbs that sum by month."""

from __future__ import annotations

from datetime import UTC, datetime

from trainmaster.core.errors import UsageError


def parse_month(text: str | None) -> datetime:
    """A time in the month, which is the present one where none is named."""
    if text is None:
        return datetime.now(UTC)
    try:
        return datetime.strptime(text, "%Y-%m").replace(tzinfo=UTC)
    except ValueError:
        raise UsageError(f"--month {text}: write a month as 2026-11") from None

"""Roles of a token."""

from __future__ import annotations

from trainmaster.core.compat import StrEnum


class Role(StrEnum):
    """Rights of a token in its project, or in every project where it names none."""

    VIEWER = "viewer"  # read
    USER = "user"  # and submit and cancel
    ADMIN = "admin"  # and tokens and webhooks; of the server also budgets, shares, targets, the audit trail


RANK = {Role.VIEWER: 0, Role.USER: 1, Role.ADMIN: 2}  # each may do what those below it may

"""Logs are captured at the root logger, and nowhere else."""

from __future__ import annotations

import logging

import pytest

ASIDE = logging.getLogger("tests.aside")
ASIDE.propagate = False


def test_what_is_logged_is_captured_and_a_logger_that_does_not_propagate_gets_no_handler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("tests.usual").info("heard")
    assert caplog.messages == ["heard"] and ASIDE.handlers == []
    assert logging.getLogger().handlers.count(caplog.handler) == 1

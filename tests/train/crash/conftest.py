"""One warmed process for all the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .warm import Warm


@pytest.fixture(scope="package")
def warm() -> Iterator[Warm]:
    started = Warm()
    yield started
    started.close()

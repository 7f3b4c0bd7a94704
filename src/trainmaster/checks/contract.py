"""Contract of a check: one module with a level, a `read` and a `judge`.

    LEVEL: int                                             1 passive (seconds), 2 uses the GPU, 3 stress
    TIMEOUT_S: float                                       optional; the runner stops waiting after it
    def read(host: Host) -> Data                           asks the machine, and only through `host`
    def judge(data: Data, expect: Expect) -> Finding | list[Finding]          pure

The runner owns the rest: deadline, errors, events, exit code.
"""

from __future__ import annotations

from typing import Any, Protocol

from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding
from trainmaster.node.host import Host

LEVELS = (1, 2, 3)
TIMEOUT_S = 60.0  # default of a check; above the 30 s default of a command, so that the command's own error is reported


class Check(Protocol):
    """Interface of a check module."""

    LEVEL: int

    def read(self, host: Host) -> Any: ...

    def judge(self, data: Any, expect: Expect) -> Finding | list[Finding]: ...

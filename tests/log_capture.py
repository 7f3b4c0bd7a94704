"""Logs are captured at the root logger alone. pytest adds its handlers to every logger that does not propagate as well.

torch has fifty of these among hundreds of loggers: they were looked for, and given two handlers, three times for each
test, which took 0.6 ms. What tests read by `caplog` comes from loggers that propagate.
"""

from __future__ import annotations

import logging
from typing import Any

from _pytest.logging import catching_logs


def _enter(self: catching_logs[Any]) -> Any:
    root = logging.getLogger()
    root.addHandler(self.handler)
    self.attached_loggers.append(root)  # pytest takes the handler from these at the end
    if self.level is not None:
        self.orig_level = root.level
        self.handler.setLevel(self.level)
        root.setLevel(min(root.level, self.level))
    return self.handler


catching_logs.__enter__ = _enter  # type: ignore[method-assign]

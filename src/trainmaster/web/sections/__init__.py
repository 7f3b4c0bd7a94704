"""Pages of the navigation and of one run: one file each with its routes. HTML only; programs use routes/."""

from __future__ import annotations

from trainmaster.web.sections import compare, cost, logs, nodes, queue, run, search, sets, settings

ROUTERS = tuple(part.router for part in (search, logs, run, sets, queue, nodes, compare, cost, settings))

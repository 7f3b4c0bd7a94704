"""The REST API is every group of routes/, in the order in which the document lists them."""

from __future__ import annotations

from trainmaster.web.routes import access, artifacts, events, fleet, health, hooks, jobs, logs, money, records

ROUTERS = tuple(part.router for part in (jobs, records, events, logs, artifacts, fleet, money, hooks, access, health))

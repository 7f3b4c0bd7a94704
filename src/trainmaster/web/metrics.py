"""Prometheus metrics: request durations and the state of the control plane."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainmaster import __version__
from trainmaster.pages.parts.machine_counts import MachineCounts
from trainmaster.store.page_rows.backlog import Backlog
from trainmaster.web.ledgers import Sums

# Seconds. Finest around the objective: 50 ms for most answers.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})  # any word may be sent as one


class Meter:
    """Metrics of one application, in a registry of its own: two applications in one process do not mix."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        own: dict[str, Any] = {"registry": (registry := CollectorRegistry()), "namespace": "trainmaster"}
        self._registry = registry
        about, labels = "Time to the first byte of the response.", ["method", "path", "status"]
        self.requests = Histogram("request_seconds", about, labels, buckets=_BUCKETS, **own)
        self.ticks = Counter("reconciler_ticks", "Successful reconciler ticks.", **own)
        self._jobs = Gauge("jobs", "Jobs by status.", ["status"], **own)
        about = "Delay from writing to ingesting the newest event of each running job."
        self._lag = Gauge("event_lag_seconds", about, ["quantile"], **own)
        self._news = Gauge("outbox_waiting", "Notifications not yet dispatched.", **own)
        self._deliveries = Gauge("deliveries_waiting", "Deliveries in flight or waiting for a retry.", **own)
        self._instances = Gauge("instances", "Rented instances by state.", ["state"], **own)
        self._held = Gauge("active_orchestrators", "Open jobs that a live reconciler holds.", **own)
        self._following = Gauge("following", "Open streaming responses.", **own)
        self._age = Gauge(
            "reconciler_tick_age_seconds", "Seconds since the last reconciler tick; -1 before the first.", **own
        )
        about = "GPU-time since the beginning by project and bin (docs/how/goodput.md)."
        self._gpu = Gauge("gpu_seconds", about, ["project", "bin"], **own)
        about = "Money of the jobs with a known price, by project and bin."
        self._money = Gauge("gpu_cost_dollars", about, ["project", "bin"], **own)
        self._targets = Gauge("target_gpu_seconds", "GPU-time by kind of target and bin.", ["target", "bin"], **own)
        about = "Effective training time ratio by project; unknown time counts as not productive."
        self._ettr = Gauge("ettr_ratio", about, ["project"], **own)
        about = "Parts of the ML productivity goodput by project: scheduling, runtime, program."
        self._goodput = Gauge("goodput_ratio", about, ["project", "part"], **own)
        Gauge("build", "Version of the server.", ["version"], **own).labels(__version__).set(1)
        self._waiting = Gauge("jobs_waiting", "Jobs in a queue; not those that wait for other jobs to end.", **own)
        self._longest = Gauge("longest_wait_seconds", "How long the first of these has waited in the queue.", **own)
        about = "Nodes by the verdict of their newest checks, and whether they are drained."
        self._nodes = Gauge("nodes", about, ["verdict", "drained"], **own)
        about = "How long the node has been drained that has been for longest; 0: none is."
        self._drained = Gauge("drained_seconds", about, **own)
        about, labels = "Devices that the queue gives out, by target and kind (gpu, slot).", ["target", "kind"]
        self._devices = Gauge("devices", about, labels, **own)
        self._used = Gauge("devices_used", "Devices that a job or another program has.", labels, **own)
        self._free = Gauge("devices_free", "Devices that a job can be given now.", labels, **own)
        self._ticked: float | None = None

    def tick(self) -> None:
        self.ticks.inc()
        self._ticked = time.monotonic()

    @property
    def tick_age_s(self) -> float | None:
        return None if self._ticked is None else time.monotonic() - self._ticked

    def render(
        self, pulse: Backlog, *, following: int, sums: Sums | None = None, machines: MachineCounts | None = None
    ) -> bytes:
        self.update(pulse, following=following, sums=sums, machines=machines)
        return generate_latest(self._registry)

    def collect(self) -> list[Metric]:
        """All metrics as they are now."""
        return list(self._registry.collect())

    def update(
        self, pulse: Backlog, *, following: int, sums: Sums | None, machines: MachineCounts | None = None
    ) -> None:
        """Set what is read from the database, not counted."""
        for status, count in pulse.jobs.items():
            self._jobs.labels(status).set(count)
        lags = sorted(pulse.event_lags_s)
        for share in (0.5, 0.95, 1.0):
            self._lag.labels(f"{share:g}").set(lags[min(len(lags) - 1, int(share * len(lags)))] if lags else 0.0)
        self._news.set(pulse.news_waiting)
        self._deliveries.set(pulse.deliveries_waiting)
        self._held.set(pulse.active_orchestrators)
        self._instances.clear()
        for state, count in pulse.instances.items():
            self._instances.labels(state).set(count)
        self._following.set(following)
        age = self.tick_age_s
        self._age.set(-1.0 if age is None else age)
        self._waiting.set(pulse.jobs_waiting)
        self._longest.set(pulse.longest_wait_s)
        if sums is not None:
            self._set_goodput(sums)
        if machines is not None:
            self._set_machines(machines)

    def _set_machines(self, counts: MachineCounts) -> None:
        for (verdict, drained), count in counts.nodes.items():
            self._nodes.labels(verdict, str(drained).lower()).set(count)
        self._drained.set(counts.drained_s)
        for gauge in (self._devices, self._used, self._free):
            gauge.clear()  # a target may be gone
        for labels, held in counts.devices.items():
            self._devices.labels(*labels).set(held.total)
            self._used.labels(*labels).set(held.used)
            self._free.labels(*labels).set(held.free)

    def _set_goodput(self, sums: Sums) -> None:
        for gauge in (self._gpu, self._money, self._targets, self._ettr, self._goodput):
            gauge.clear()  # a project may have moved into the others
        for name, tally in sums.projects.items():
            for bin_, us in tally.gpu_us.items():
                self._gpu.labels(name, bin_.value).set(us / 1e6)
                if tally.jobs > tally.unpriced_jobs:
                    self._money.labels(name, bin_.value).set(tally.cents[bin_] / 100)
            ratios = {"scheduling": tally.scheduling, "runtime": tally.runtime, "program": tally.program}
            for part, ratio in ratios.items():
                if ratio is not None:
                    self._goodput.labels(name, part).set(ratio)
            if tally.ettr is not None:
                self._ettr.labels(name).set(tally.ettr)
        for name, tally in sums.targets.items():
            for bin_, us in tally.gpu_us.items():
                self._targets.labels(name, bin_.value).set(us / 1e6)


UNMEASURED = "unmeasured"  # in the state of a request that the server makes to itself


class MetricsMiddleware:
    """Measure the duration of every request of somebody."""

    def __init__(self, app: ASGIApp, *, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or UNMEASURED in scope.get("state", {}):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def send_timed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start" and not status:
                status = message["status"]
                # By route, not by path: a series for each job id would grow without bound.
                path = getattr(scope.get("route"), "path", None) or "(none)"
                took = time.perf_counter() - began
                method = scope["method"] if scope["method"] in METHODS else "(other)"
                self._meter.requests.labels(method, path, str(status)).observe(took)
            await send(message)

        await self._app(scope, receive, send_timed)

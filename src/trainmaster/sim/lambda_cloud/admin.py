"""Paths of the simulator itself: what happened, and faults on demand. They need the API key and have no rate limit.

GET  /sim/summary       instance-minutes, cost, requests by status, violations
GET  /sim/instances     every instance ever launched, with its hardware, faults and cost
GET  /sim/faults        every fault with its effect and rate
POST /sim/faults        {"fault": NAME, "times": N} at the next opportunities
                        {"fault": NAME, "instance_id": ID} to this instance now
                        {"rates": {NAME: RATE}} from now on
                        {"refuse": {"status": 403, "code": "global/account-inactive"}} the next request
POST /sim/foreign       {"name": NAME} adds an instance of somebody else
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainmaster.core.errors import UsageError
from trainmaster.sim.lambda_cloud.answering import Answer, Answering, Request
from trainmaster.sim.lambda_cloud.cloud import find_known
from trainmaster.sim.lambda_cloud.faults import FAULTS, parse_rates
from trainmaster.sim.lambda_cloud.fleet import Fleet
from trainmaster.sim.lambda_cloud.summary import describe, summarise

PREFIX = "/sim/"
# Faults that can happen to an instance that is there already.
LIVE_FAULTS = ("preempted", "terminated", "unhealthy", "cuda-broken", "link-cut")


class Admin:
    """The simulator's own paths, and the same as calls."""

    def __init__(self, answering: Answering, fleet: Fleet) -> None:
        self._answering, self._fleet, self._cloud = answering, fleet, answering.cloud

    def answer(self, request: Request) -> Answer:
        if not self._answering.knows(request.headers.get("authorization", "")):
            return _answer(401, {"error": "the simulator's own paths need its API key"})
        try:
            body = json.loads(request.body) if request.body else {}
            match request.method, request.path.removeprefix(PREFIX):
                case "GET", "summary":
                    return _answer(200, self.summary())
                case "GET", "instances":
                    return _answer(200, self.instances())
                case "GET", "faults":
                    return _answer(200, self.faults())
                case "POST", "faults":
                    self.change(body)
                    return _answer(200, self.faults())
                case "POST", "foreign":
                    return _answer(200, describe(self._cloud, self._cloud.add_foreign(str(body["name"]))))
        except (UsageError, ValueError, KeyError, TypeError, AttributeError) as error:
            return _answer(400, {"error": str(error)})
        return _answer(404, {"error": f"no such path: {request.method} {request.path}"})

    def summary(self) -> dict[str, Any]:
        return summarise(self._cloud, self._answering.requests, self._answering.limits)

    def instances(self) -> list[dict[str, Any]]:
        """Every instance ever launched, as the simulator knows it."""
        with self._cloud.lock:
            return [describe(self._cloud, instance) for instance in self._cloud.instances.values()]

    def faults(self) -> dict[str, Any]:
        with self._cloud.lock:
            faults = self._cloud.faults
            rows = {
                name: {"kind": fault.kind, "effect": fault.effect, "rate": faults.rates.get(name, 0.0)}
                for name, fault in FAULTS.items()
            }
            return {"faults": rows, "armed": faults.armed, "injected": dict(faults.injected)}

    def inject(self, fault: str, *, instance_id: str | None = None, times: int = 1) -> None:
        """Let a fault happen at its next opportunities, or to one instance now."""
        with self._cloud.lock:
            if instance_id is None:
                self._cloud.faults.arm(fault, times)
                return
            instance = find_known(self._cloud, instance_id)
            if fault not in LIVE_FAULTS:
                raise UsageError(f"{fault!r} cannot happen to a running instance; these can: {', '.join(LIVE_FAULTS)}")
            self._cloud.faults.injected[fault] += 1
        self._fleet.inject(instance, fault)

    def change(self, body: Mapping[str, Any]) -> None:
        """A request of POST /sim/faults."""
        if "fault" in body:
            self.inject(str(body["fault"]), instance_id=body.get("instance_id"), times=int(body.get("times", 1)))
        elif "rates" in body:
            rates = parse_rates(",".join(f"{name}={rate}" for name, rate in body["rates"].items()))
            with self._cloud.lock:
                self._cloud.faults.rates.update(rates)
        elif "refuse" in body:
            self._answering.refuse_next(int(body["refuse"]["status"]), str(body["refuse"]["code"]))
        else:
            raise UsageError("give fault, rates or refuse")


def _answer(status: int, body: Any) -> Answer:
    return Answer(status=status, body=json.dumps(body).encode())

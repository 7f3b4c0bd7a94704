"""Traces and metrics over OTLP, read back by OpenTelemetry's own messages: no secrets in them, nobody waits."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from starlette.testclient import TestClient

from pages import samples
from trainmaster.core.errors import UsageError
from trainmaster.core.roles import Role
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.otlp.exporter import _MOST_SPANS, Exporter
from trainmaster.web.otlp.settings import read_settings
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, issue

pytestmark = pytest.mark.spawns
KEY = "api-key-of-the-collector"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A receiver of OTLP/HTTP that keeps every request."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str | None, bytes]] = []
        self.status = 200
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                kept.got.append((self.path, self.headers["api-key"], body))
                self.send_response(kept.status)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def spans(self) -> list[Span]:
        bodies = [body for path, _, body in self.got if path == "/v1/traces"]
        groups = [group for body in bodies for group in ExportTraceServiceRequest.FromString(body).resource_spans]
        return [span for group in groups for scope in group.scope_spans for span in scope.spans]

    def metrics(self) -> dict[str, Metric]:
        """Of the last export."""
        body = [body for path, _, body in self.got if path == "/v1/metrics"][-1]
        (group,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
        named = {pair.key: pair.value.string_value for pair in group.resource.attributes}
        assert named["service.name"] == "trainmaster" and named["deployment"] == "a b"
        return {metric.name: metric for scope in group.scope_metrics for metric in scope.metrics}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def variables(collector: Collector, **more: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url + "/",
        "OTEL_EXPORTER_OTLP_HEADERS": f"api-key={KEY}",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment=a%20b",
        **more,
    }


def client(db: Database, home: Path, settings: dict[str, str]) -> TestClient:
    app = create_app(db, home, reconcile=False, require_token=True, otlp=read_settings(settings))
    return TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False)


def words(span: Span) -> dict[str, str | int]:
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}


def test_a_span_for_each_request_without_what_is_in_its_address(
    db: Database, tmp_path: Path, collector: Collector
) -> None:
    story, token = samples.completed(db), issue(db, "hidden-name", Role.ADMIN)
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with client(db, tmp_path, variables(collector)) as caller:
        assert caller.get(f"{JOBS}/{story.id}", headers={**token, **parent}).status_code == 200
        assert caller.get(f"{JOBS}/{story.id}?secret-word=1", headers=token).status_code == 400
        assert caller.get("/v1/secret-path", headers=token).status_code == 404
        assert caller.get("/v1/me").status_code == 401
        assert caller.request("SECRETVERB", "/v1/me", headers=token).status_code in (404, 405)
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert caller.get("/v1/me", headers={**token, **unsampled}).status_code == 200
    first, refused, missing, stranger, verb = collector.spans()
    assert first.name == f"GET {JOBS}/{{uuid}}"
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert first.kind == Span.SPAN_KIND_SERVER and 0 < first.end_time_unix_nano - first.start_time_unix_nano < 60e9
    assert abs(first.start_time_unix_nano - time.time_ns()) < 60e9 and len(first.span_id) == 8
    assert words(first)["http.response.status_code"] == 200 and words(first)["http.request.method"] == "GET"
    assert refused.name == first.name and words(refused)["http.response.status_code"] == 400
    assert missing.name == "GET (none)" and words(stranger)["http.response.status_code"] == 401
    assert verb.name.startswith("_OTHER ") and len({span.trace_id for span in collector.spans()}) == 5
    everything = b" ".join(body for _, _, body in collector.got)
    for hidden in (
        "secret-word",
        "secret-path",
        "SECRETVERB",
        story.id,
        token["Authorization"][7:],
        "hidden-name",
        KEY,
    ):
        assert hidden.encode() not in everything, hidden
    assert {key for _, key, _ in collector.got} == {KEY}


def test_the_metrics_are_those_of_the_page(db: Database, tmp_path: Path, collector: Collector) -> None:
    samples.completed(db)
    token = issue(db, "ann", Role.ADMIN)
    with client(db, tmp_path, variables(collector)) as caller:
        for _ in range(3):
            caller.get("/v1/me", headers=token)
    found = collector.metrics()
    (jobs,) = [
        p for p in found["trainmaster_jobs"].gauge.data_points if p.attributes[0].value.string_value == "completed"
    ]
    assert jobs.as_double == 1.0
    (point,) = found["trainmaster_request_seconds"].histogram.data_points
    assert {pair.key: pair.value.string_value for pair in point.attributes} == {
        "method": "GET", "path": "/v1/me", "status": "200",
    }  # fmt: skip
    assert point.count == 3 == sum(point.bucket_counts) and 0 < point.sum < 60
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1 and point.explicit_bounds[0] == 0.005
    ticks = found["trainmaster_reconciler_ticks"].sum
    assert ticks.is_monotonic and ticks.data_points[0].as_double == 0.0
    assert ticks.data_points[0].start_time_unix_nano < ticks.data_points[0].time_unix_nano


def test_metrics_are_sent_again_and_again(db: Database, tmp_path: Path, collector: Collector) -> None:
    with client(db, tmp_path, variables(collector, OTEL_METRIC_EXPORT_INTERVAL="100", OTEL_TRACES_EXPORTER="none")):
        until = time.monotonic() + 20
        while len(collector.got) < 3 and time.monotonic() < until:
            time.sleep(0.05)
    assert len(collector.got) >= 3 and {path for path, _, _ in collector.got} == {"/v1/metrics"}


@pytest.mark.parametrize("trouble", ["refuses", "away"])
def test_a_collector_that_fails_costs_nothing_but_a_line(
    db: Database, tmp_path: Path, collector: Collector, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 503
    settings = variables(collector, OTEL_METRIC_EXPORT_INTERVAL="100")
    if trouble == "away":
        settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
    with caplog.at_level(logging.WARNING), client(db, tmp_path, settings) as caller:
        assert caller.get("/healthz").status_code == 200
        until = time.monotonic() + 20
        while not any("collector" in record.getMessage() for record in caplog.records) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)  # it fails again meanwhile, and says so no second time
        assert caller.get("/healthz").status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]
    assert ("HTTP 503" if trouble == "refuses" else "ConnectError") in line and KEY not in line


def test_what_waits_is_bounded(collector: Collector) -> None:
    settings = read_settings(variables(collector))
    assert settings is not None and KEY not in repr(settings)
    exporter = Exporter(settings)
    for _ in range(_MOST_SPANS + 5):
        exporter.add(None)  # type: ignore[arg-type]
    assert exporter.dropped == 5


@pytest.mark.parametrize(
    ("sampler", "argument", "kept"),
    [("always_off", "", 0.0), ("traceidratio", "0.25", 0.25), ("parentbased_traceidratio", "1", 1.0)],
)
def test_samplers(collector: Collector, sampler: str, argument: str, kept: float) -> None:
    settings = read_settings(variables(collector, OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG=argument))
    assert settings is not None
    drawn = sum(Exporter(settings).sample("") is not None for _ in range(4000)) / 4000
    assert abs(drawn - kept) < 0.05
    by_caller = Exporter(settings).sample(f"00-{TRACE}-{PARENT}-01")
    assert (by_caller is not None) == (sampler != "always_off" and (kept == 1.0 or bytes.fromhex(TRACE)[8] < 64))
    for wrong in ("00-" + "0" * 32 + f"-{PARENT}-01", f"00-{TRACE}-{PARENT}", "x" * 5000, f"01-{TRACE}-{PARENT}-01"):
        found = Exporter(settings).sample(wrong)
        assert found is None or found[1] == b"", "a parent that is none"


def test_variables() -> None:
    base = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c.example:4318/otlp"}
    found = read_settings(base)
    assert found is not None and found.traces == "https://c.example:4318/otlp/v1/traces"
    own = read_settings({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c.example/x"})
    assert own is not None and (own.traces, own.metrics) == (None, "http://c.example/x")
    assert read_settings({}) is None and read_settings({**base, "OTEL_SDK_DISABLED": "true"}) is None
    assert read_settings({**base, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}) is None
    for name, value in {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": "c.example:4317",
        "OTEL_EXPORTER_OTLP_HEADERS": "topsecret", "OTEL_EXPORTER_OTLP_TIMEOUT": "soon", "OTEL_TRACES_SAMPLER": "some",
        "OTEL_TRACES_EXPORTER": "zipkin",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=name) as error:
            read_settings({**base, name: value})
        assert "topsecret" not in str(error.value)


@pytest.mark.proof
def test_the_command_sends_by_the_environment(tmp_path: Path, collector: Collector) -> None:
    serve = [sys.executable, "-m", "trainmaster", "serve", "--home", str(tmp_path), "--port", "0", "--no-reconcile"]
    env = {**os.environ, **variables(collector, OTEL_METRIC_EXPORT_INTERVAL="200")}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(serve, env=env, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while not collector.got and server.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        server.terminate()
        server.wait(30)
    assert "trainmaster_build" in collector.metrics(), (tmp_path / "log").read_text()
    assert KEY not in (tmp_path / "log").read_text()

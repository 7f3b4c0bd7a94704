"""Spans and metrics as the messages of OTLP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainmaster import __version__

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One request. It holds the template of its route, never an address or a name."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    method: str
    route: str
    status: int
    began_ns: int
    ended_ns: int


def encode_traces(spans: Sequence[Span], resource: Mapping[str, str]) -> bytes:
    """An ExportTraceServiceRequest."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1 import trace_pb2

    made = []
    for span in spans:
        failed = span.status >= 500
        words = {"http.request.method": span.method, "http.route": span.route}
        words |= {"error.type": str(span.status)} if failed else {}
        codes = trace_pb2.Status
        made.append(
            trace_pb2.Span(
                trace_id=span.trace_id,
                span_id=span.span_id,
                parent_span_id=span.parent_id,
                name=f"{span.method} {span.route}",
                kind=trace_pb2.Span.SPAN_KIND_SERVER,
                start_time_unix_nano=span.began_ns,
                end_time_unix_nano=span.ended_ns,
                attributes=_attributes({**words, "http.response.status_code": span.status}),
                status=codes(code=codes.STATUS_CODE_ERROR if failed else codes.STATUS_CODE_UNSET),
            )
        )
    scope = trace_pb2.ScopeSpans(scope=_scope(), spans=made)
    group = trace_pb2.ResourceSpans(resource=_resource(resource), scope_spans=[scope])
    return bytes(ExportTraceServiceRequest(resource_spans=[group]).SerializeToString())


def encode_metrics(families: Iterable[Metric], resource: Mapping[str, str], *, since_ns: int, now_ns: int) -> bytes:
    """An ExportMetricsServiceRequest with the metrics of /metrics, by the same names."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.metrics.v1 import metrics_pb2

    times: dict[str, Any] = {"start_time_unix_nano": since_ns, "time_unix_nano": now_ns}
    whole = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    made = []
    for family in families:
        metric = metrics_pb2.Metric(name=family.name, description=family.documentation)
        if family.type == "histogram":
            points = [
                metrics_pb2.HistogramDataPoint(attributes=_attributes(labels), **values, **times)
                for labels, values in _histograms(family.samples)
            ]
            metric.histogram.CopyFrom(metrics_pb2.Histogram(data_points=points, aggregation_temporality=whole))
        else:
            numbers = [
                metrics_pb2.NumberDataPoint(attributes=_attributes(sample.labels), as_double=sample.value, **times)
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            if family.type == "counter":
                sums = metrics_pb2.Sum(data_points=numbers, aggregation_temporality=whole, is_monotonic=True)
                metric.sum.CopyFrom(sums)
            else:
                metric.gauge.CopyFrom(metrics_pb2.Gauge(data_points=numbers))
        made.append(metric)
    scope = metrics_pb2.ScopeMetrics(scope=_scope(), metrics=made)
    group = metrics_pb2.ResourceMetrics(resource=_resource(resource), scope_metrics=[scope])
    return bytes(ExportMetricsServiceRequest(resource_metrics=[group]).SerializeToString())


def _histograms(samples: Iterable[Sample]) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """The points of a histogram. Prometheus counts each bucket with those below it, OTLP alone."""
    points: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        point = points.setdefault(tuple(sorted(labels.items())), {"bounds": [], "counts": [], "sum": 0.0, "count": 0})
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            point["bounds"] += [] if math.isinf(bound) else [bound]
            point["counts"].append(int(sample.value))
        elif sample.name.endswith("_sum"):
            point["sum"] = sample.value
        elif sample.name.endswith("_count"):
            point["count"] = int(sample.value)
    return [
        (
            dict(labels),
            {
                "explicit_bounds": point["bounds"],
                "bucket_counts": [n - below for below, n in zip([0, *point["counts"]], point["counts"], strict=False)],
                "sum": point["sum"],
                "count": point["count"],
            },
        )
        for labels, point in points.items()
    ]


def _attributes(values: Mapping[str, str | int]) -> list[Any]:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    return [
        KeyValue(key=key, value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value))
        for key, value in values.items()
    ]


def _scope() -> Any:
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope

    return InstrumentationScope(name="trainmaster", version=__version__)


def _resource(values: Mapping[str, str]) -> Any:
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    return Resource(attributes=_attributes(values))

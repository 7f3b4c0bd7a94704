"""The variables of OpenTelemetry that the server reads. The values of headers are secrets, and shown nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from trainmaster import __version__
from trainmaster.core.errors import UsageError

_BASE = "OTEL_EXPORTER_OTLP_"
PROTOCOL = "http/protobuf"
_RATIOS = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
_SAMPLERS = {
    **{name: (ratio, False) for name, ratio in _RATIOS.items()},
    **{f"parentbased_{name}": (ratio, True) for name, ratio in _RATIOS.items()},
}


@dataclass(frozen=True, kw_only=True)
class Otlp:
    """Where traces and metrics go; None: nowhere."""

    traces: str | None
    metrics: str | None
    headers: Mapping[str, str]
    timeout_s: float
    interval_s: float  # between two exports of metrics
    ratio: float  # of traces that begin here and are kept
    by_parent: bool  # a trace that a caller began is kept or not as the caller decided
    resource: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Otlp(traces={self.traces is not None}, metrics={self.metrics is not None})"


def read_settings(environment: Mapping[str, str]) -> Otlp | None:
    """The settings; None where nothing is to be sent. UsageError names a variable, never its value."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    traces, metrics = (_endpoint(environment, signal) for signal in ("traces", "metrics"))
    if traces is None and metrics is None:
        return None
    for name in (f"{_BASE}PROTOCOL", f"{_BASE}TRACES_PROTOCOL", f"{_BASE}METRICS_PROTOCOL"):
        if environment.get(name) not in (None, "", PROTOCOL):
            raise UsageError(f"{name}: only {PROTOCOL} is supported; point it at the collector's HTTP port (4318)")
    ratio, by_parent = _sampler(environment)
    return Otlp(
        traces=traces,
        metrics=metrics,
        headers=_pairs(environment, f"{_BASE}HEADERS"),
        timeout_s=_milliseconds(environment, f"{_BASE}TIMEOUT", 10_000) / 1000,
        interval_s=_milliseconds(environment, "OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1000,
        ratio=ratio,
        by_parent=by_parent,
        resource={
            "service.version": __version__,
            **_pairs(environment, "OTEL_RESOURCE_ATTRIBUTES"),
            "service.name": environment.get("OTEL_SERVICE_NAME") or "trainmaster",
        },
    )


def _endpoint(environment: Mapping[str, str], signal: str) -> str | None:
    exporter = environment.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
    if exporter not in ("otlp", "none"):
        raise UsageError(f"OTEL_{signal.upper()}_EXPORTER: only otlp and none are supported")
    own, base = f"{_BASE}{signal.upper()}_ENDPOINT", f"{_BASE}ENDPOINT"
    name = own if environment.get(own) else base
    url = environment.get(name)
    if not url or exporter == "none":
        return None
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(f"{name}: not an address such as http://127.0.0.1:4318")
    return url if name == own else f"{url.rstrip('/')}/v1/{signal}"


def _pairs(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """`a=b,c=d` with percent-encoded values."""
    pairs: dict[str, str] = {}
    for part in environment.get(name, "").split(","):
        key, equals, value = part.partition("=")
        if not part.strip():
            continue
        text = unquote(value.strip())
        if not equals or not key.strip().isascii() or not key.strip() or not text.isprintable():
            raise UsageError(f"{name}: not a list such as name=value,other=value")
        pairs[key.strip()] = text
    return pairs


def _milliseconds(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isascii() or not text.isdecimal() or not 100 <= int(text[:12]) <= 86_400_000:
        raise UsageError(f"{name}: not a number of milliseconds from 100 to a day")
    return int(text)


def _sampler(environment: Mapping[str, str]) -> tuple[float, bool]:
    name = environment.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    if name not in _SAMPLERS:
        raise UsageError(f"OTEL_TRACES_SAMPLER: not one of {', '.join(_SAMPLERS)}")
    ratio, by_parent = _SAMPLERS[name]
    if ratio is None:
        try:
            ratio = float(environment.get("OTEL_TRACES_SAMPLER_ARG") or 1.0)
        except ValueError:
            ratio = -1.0
        if not 0.0 <= ratio <= 1.0:
            raise UsageError("OTEL_TRACES_SAMPLER_ARG: not a ratio from 0 to 1")
    return ratio, by_parent

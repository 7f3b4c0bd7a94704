"""Traces and metrics of the server over OTLP: off unless OTEL_EXPORTER_OTLP_ENDPOINT is set."""

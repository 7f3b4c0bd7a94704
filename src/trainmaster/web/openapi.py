"""The OpenAPI document: the routes as FastAPI describes them, the schema of a spec, and the security schemes."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from trainmaster import __version__
from trainmaster.core.spec import JobSpec
from trainmaster.web.auth import PUBLIC

_SPEC = "JobSpec"
SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{_SPEC}"}}},
    }
}
SET_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/SetSpec"}}},
    }
}
_SET = {
    "type": "object",
    "title": "SetSpec",
    "description": "The fields of JobSpec, and those of a set of runs",
    "required": ["name"],
    "anyOf": [{"required": ["matrix"]}, {"required": ["search"]}, {"required": ["schedule"]}],
    "properties": {
        "name": {"type": "string"},
        "matrix": {
            "type": "object",
            "description": "field of the spec, or name of a variable, and the values to try",
            "additionalProperties": {"type": "array", "items": {}, "minItems": 1},
        },
        "search": {
            "type": "object",
            "description": "what is varied, and how trials are proposed and stopped: docs/reference/spec.md",
            "required": ["parameters"],
            "additionalProperties": True,
        },
        "schedule": {
            "type": "object",
            "description": "times at which the runs begin: docs/reference/spec.md",
            "required": ["cron"],
            "additionalProperties": True,
        },
        "parallel": {"type": "integer", "minimum": 1, "maximum": 1000, "description": "trials open at once"},
    },
    "additionalProperties": True,
}
_NAMES = {
    "AuditEntry": "AuditRow",
    "CheckRecord": "CheckRow",
    "Epoch": "EpochRow",
    "Event": "EventRow",
    "Instance": "InstanceRow",
    "Node": "NodeRow",
    "TargetState": "Report",
    "Token": "TokenRow",
    "Webhook": "WebhookRow",
}
_ABOUT = """Training jobs: submit, follow, cancel, and their results.

Errors are `{"error": {"code", "message", "faults"}}`; branch on `code`. Times are ISO 8601 in UTC, money is in cents.
"""


def document(app: FastAPI, *, loopback: bool) -> Callable[[], dict[str, Any]]:
    """A function that makes the document once."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(
                get_openapi(title="Trainmaster", version=__version__, description=_ABOUT, routes=app.routes),
                loopback=loopback,
            )
        return app.openapi_schema

    return make


def _complete(document: dict[str, Any], *, loopback: bool) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(_spec())
    components["schemas"]["SetSpec"] = _SET
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "description": "tm_…"}}
    # An empty requirement means that no token is needed.
    document["security"] = [{"token": []}, {}] if loopback else [{"token": []}]
    for path, operations in document["paths"].items():
        if path in PUBLIC:
            for operation in operations.values():
                operation["security"] = []
    return _published(document)


def _published(document: dict[str, Any]) -> dict[str, Any]:
    """Schemas under the names that earlier versions of the document gave them: generated clients use these names."""
    schemas = document["components"]["schemas"]
    for now, then in _NAMES.items():
        schemas[then] = {**schemas.pop(now), "title": then}
    text = json.dumps(document)
    for now, then in _NAMES.items():
        text = text.replace(f'"#/components/schemas/{now}"', f'"#/components/schemas/{then}"')
    renamed: dict[str, Any] = json.loads(text)
    return renamed


def _spec() -> dict[str, Any]:
    """Schemas of a job's spec, without additional properties, as the parser has it."""
    # Prefixed: JobPage has a Preflight too.
    whole = TypeAdapter(JobSpec).json_schema(ref_template="#/components/schemas/Spec{model}")
    parts: dict[str, Any] = whole.pop("$defs", {})
    schemas = {**{f"Spec{name}": part for name, part in parts.items()}, _SPEC: whole}
    for schema in schemas.values():
        if schema.get("type") == "object":
            schema["additionalProperties"] = False
        for value in schema.get("properties", {}).values():
            _anchor(value)
    _state_defaults(JobSpec, schemas, _SPEC)
    return schemas


def _state_defaults(cls: type[Any], schemas: dict[str, Any], name: str) -> None:
    """Defaults that other fields decide as words: a number of theirs is none that a client may count on."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if words := item.metadata.get("default_text"):
            value = schemas[name]["properties"][item.name]
            value.pop("default", None)
            value["description"] = f"{value.get('description', '')} (default: {words})".lstrip()
        for inner in (hints[item.name], *typing.get_args(hints[item.name])):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                _state_defaults(inner, schemas, f"Spec{inner.__name__}")


def _anchor(value: dict[str, Any]) -> None:
    """Our patterns match the whole text; those of JSON Schema match any part."""
    if "pattern" in value:
        value["pattern"] = f"^(?:{value['pattern']})$"
    for option in value.get("anyOf", ()):
        _anchor(option)

"""Facts of the Lambda Cloud API (data/lambda_api.json): operations, fields, limits, enums and error codes.

The client and the simulator validate against the same digest. It is written from the vendor's OpenAPI by
`tools/write_lambda_digest.py` and holds the operations that Trainmaster uses.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trainmaster.core.errors import Fault

# Rate limits: stated in words in the description of the vendor's OpenAPI 1.10.0.
REQUEST_INTERVAL_S = 1.0
LAUNCH_INTERVAL_S = 12.0
# Limits that the OpenAPI 1.10.0 states in the description of a field and not in its schema.
SSH_KEYS_PER_LAUNCH = 1
USER_DATA_MAX_BYTES = 1_000_000

_SCHEMA_PREFIX = "#/components/schemas/"
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: `path` has its parameters in braces, `responses` are the schemas of whole bodies by status."""

    name: str  # the vendor's operationId
    method: str
    path: str
    query: tuple[str, ...]
    request: Schema | None
    responses: Mapping[int, Schema]


def operations() -> Mapping[str, Operation]:
    """Every operation of the digest by its operationId."""
    return _operations()


def find_operation(method: str, path: str) -> Operation | None:
    """Operation of a request, by its method and its path with the real ids."""
    parts = path.split("/")
    return next((item for item in _operations().values() if item.method == method and _fits(item.path, parts)), None)


def schema(name: str) -> Schema:
    """One of the vendor's named schemas (`Instance`, `InstanceStatus`, …)."""
    named: Schema = _document()["schemas"][name]
    return named


def statuses() -> tuple[str, ...]:
    """Every status that an instance can have."""
    return tuple(schema("InstanceStatus")["enum"])


def find_faults(wanted: Schema, value: object, path: str = "") -> list[Fault]:
    """Every place where a value does not fit a schema. Unknown fields are faults only where the schema forbids them."""
    if reference := wanted.get("$ref"):
        return find_faults(schema(reference.removeprefix(_SCHEMA_PREFIX)), value, path)
    if choices := wanted.get("anyOf"):
        tried = [find_faults(choice, value, path) for choice in choices]
        return [] if not all(tried) else min(tried, key=len)
    if not _has_type(wanted.get("type"), value):
        return [Fault(path=path, message=f"not of type {wanted['type']}")]
    if "const" in wanted and value != wanted["const"]:
        return [Fault(path=path, message=f"not {wanted['const']!r}")]
    if "enum" in wanted and value not in wanted["enum"]:
        return [Fault(path=path, message=f"none of {', '.join(map(str, wanted['enum']))}")]
    if isinstance(value, str):
        return _string_faults(wanted, value, path)
    if isinstance(value, Mapping):
        return _object_faults(wanted, value, path)
    if isinstance(value, list) and "items" in wanted:
        return [fault for at, item in enumerate(value) for fault in find_faults(wanted["items"], item, f"{path}[{at}]")]
    return []


def _string_faults(wanted: Schema, value: str, path: str) -> list[Fault]:
    faults = []
    if len(value) < wanted.get("minLength", 0):
        faults.append(Fault(path=path, message=f"shorter than {wanted['minLength']} characters"))
    if len(value) > wanted.get("maxLength", len(value)):
        faults.append(Fault(path=path, message=f"longer than {wanted['maxLength']} characters"))
    if "pattern" in wanted and not re.search(_python_pattern(wanted["pattern"]), value):
        faults.append(Fault(path=path, message=f"does not match {wanted['pattern']}"))
    return faults


def _object_faults(wanted: Schema, value: Mapping[str, object], path: str) -> list[Fault]:
    at = f"{path}." if path else ""
    faults = [Fault(path=f"{at}{name}", message="missing") for name in wanted.get("required", ()) if name not in value]
    known, others = wanted.get("properties", {}), wanted.get("additionalProperties", True)
    for name, part in value.items():
        if name in known:
            faults += find_faults(known[name], part, f"{at}{name}")
        elif others is False:
            faults.append(Fault(path=f"{at}{name}", message="unknown field"))
        elif isinstance(others, Mapping):
            faults += find_faults(others, part, f"{at}{name}")
    return faults


def _has_type(wanted: str | None, value: object) -> bool:
    match wanted:
        case "object":
            return isinstance(value, Mapping)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "null":
            return value is None
        case None:
            return True
    raise AssertionError(f"lambda_api.json: type {wanted}")


def _python_pattern(pattern: str) -> str:
    """A pattern of the OpenAPI for Python, where `$` would also match before a newline at the end."""
    return pattern[:-1] + r"\Z" if pattern.endswith("$") else pattern


def _fits(template: str, parts: Sequence[str]) -> bool:
    wanted = template.split("/")
    return len(wanted) == len(parts) and all(
        bool(part) if name.startswith("{") else name == part for name, part in zip(wanted, parts, strict=True)
    )


@functools.cache
def _operations() -> Mapping[str, Operation]:
    return {
        name: Operation(
            name=name,
            method=row["method"],
            path=row["path"],
            query=tuple(row.get("query", ())),
            request=row.get("request"),
            responses={int(status): body for status, body in row["responses"].items()},
        )
        for name, row in _document()["operations"].items()
    }


@functools.cache
def _document() -> Mapping[str, Any]:
    text = (resources.files("trainmaster.core") / "data" / "lambda_api.json").read_text(encoding="utf-8")
    document: Mapping[str, Any] = json.loads(text)
    return document

"""Write core/data/lambda_api.json: python tools/write_lambda_digest.py VENDORS_OPENAPI.json [--check].

Only facts are kept: paths, methods, types, required fields, enums, limits, patterns and error codes. Descriptions,
examples and default sentences are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DIGEST = Path(__file__).parents[1] / "src" / "trainmaster" / "core" / "data" / "lambda_api.json"
# The operations that the client and the simulator use.
USED = (
    "listInstanceTypes", "listInstances", "getInstance", "postInstance", "launchInstance", "terminateInstance",
    "restartInstance", "listSSHKeys", "addSSHKey", "deleteSSHKey", "listFilesystems", "createFilesystem",
    "filesystemDelete", "listImages", "listRegions",
)  # fmt: skip
FACTS = (
    "$ref", "type", "const", "enum", "pattern", "minLength", "maxLength", "required", "additionalProperties",
    "items", "anyOf", "properties",
)  # fmt: skip


def digest(openapi: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the used operations and of every schema that they name."""
    found = {
        operation["operationId"]: _operation(method.upper(), path, operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
        if operation.get("operationId") in USED
    }
    operations = {name: found[name] for name in USED}
    schemas: dict[str, Any] = {}
    waiting = sorted(set(_references(operations)))
    while waiting:
        name = waiting.pop(0)
        if name not in schemas:
            schemas[name] = _facts(openapi["components"]["schemas"][name])
            waiting.extend(_references(schemas[name]))
    return {
        "source": f"Lambda Cloud API, OpenAPI {openapi['info']['version']}, {openapi['servers'][0]['url']}api/v1",
        "version": openapi["info"]["version"],
        "date": "2026-11-15",
        "operations": operations,
        "schemas": dict(sorted(schemas.items())),
    }


def render(openapi: Mapping[str, Any]) -> str:
    """The digest as text: one operation or schema per line, so that a change of the vendor is a short diff."""
    document = digest(openapi)
    parts = []
    for key, value in document.items():
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
            parts.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"method": method, "path": path}
    query = [item["name"] for item in operation.get("parameters", []) if item["in"] == "query"]
    if query:
        facts["query"] = query
    if "requestBody" in operation:
        facts["request"] = _facts(operation["requestBody"]["content"]["application/json"]["schema"])
    facts["responses"] = {
        status: _facts(answer["content"]["application/json"]["schema"])
        for status, answer in operation["responses"].items()
    }
    return facts


def _facts(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key in FACTS:
        if key not in schema:
            continue
        value = schema[key]
        if key == "properties":
            kept[key] = {name: _facts(part) for name, part in value.items()}
        elif key == "anyOf":
            kept[key] = [_facts(part) for part in value]
        else:
            kept[key] = _facts(value)
    return kept


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key == "$ref":
                yield part.removeprefix("#/components/schemas/")
            else:
                yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    text = render(json.loads(Path(sys.argv[1]).read_text()))
    if "--check" in sys.argv:
        old = "lambda_api.json differs from this OpenAPI; run: python tools/write_lambda_digest.py OPENAPI.json"
        sys.exit(None if DIGEST.read_text() == text else old)
    DIGEST.write_text(text)

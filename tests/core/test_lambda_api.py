"""The digest of the Lambda Cloud API: its facts, its validator, and that it agrees with the vendor's OpenAPI."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from trainmaster.core.vendors import lambda_api
from trainmaster.core.vendors.lambda_api import find_faults, find_operation, operations, schema

ROOT = Path(__file__).parents[2]
OPENAPI = os.environ.get("TRAINMASTER_LAMBDA_OPENAPI")
needs_openapi = pytest.mark.skipif(not OPENAPI, reason="TRAINMASTER_LAMBDA_OPENAPI names no vendor's OpenAPI")
LAUNCH = {"region_name": "us-east-1", "instance_type_name": "gpu_8x_h100_sxm5", "ssh_key_names": ["key"]}


def test_operations_are_found_by_real_paths() -> None:
    found = find_operation("GET", "/api/v1/instances/0920582c7ff041399e34823a0be62549")
    assert found is not None and found.name == "getInstance"
    assert find_operation("GET", "/api/v1/instances/") is None
    assert find_operation("DELETE", "/api/v1/instances") is None
    assert find_operation("GET", "/api/v1/file-systems") is operations()["listFilesystems"]
    assert find_operation("POST", "/api/v1/filesystems") is operations()["createFilesystem"]


def test_statuses() -> None:
    assert set(lambda_api.statuses()) == {"booting", "active", "unhealthy", "terminated", "terminating", "preempted"}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"quantity": 1}, None),  # the schema allows unknown fields in requests
        ({"name": "n" * 65}, "name: longer than 64 characters"),
        ({"hostname": "h" * 63}, None),
        ({"hostname": "good\n"}, "hostname: does not match ^[a-z0-9][0-9a-z-]{0,62}$"),
        ({"ssh_key_names": "key"}, "ssh_key_names: not of type array"),
        ({"ssh_key_names": ["key", 3]}, "ssh_key_names[1]: not of type string"),
        ({"region_name": None}, "region_name: not of type string"),
        ({"tags": [{"key": "Upper", "value": "v"}]}, "tags[0].key: does not match ^[a-z][a-z0-9-:]+$"),
        ({"tags": [{"key": "nonce"}]}, "tags[0].value: missing"),
        ({"image": {"id": "a"}}, None),
        ({"image": {"family": "a"}}, None),
        ({"image": {}}, "image.id: missing"),
    ],
)
def test_a_launch_request_is_judged(change: dict[str, object], fault: str | None) -> None:
    wanted = operations()["launchInstance"].request
    assert wanted is not None
    assert [str(found) for found in find_faults(wanted, LAUNCH | change)] == ([fault] if fault else [])


def test_a_response_is_judged() -> None:
    wanted = operations()["listInstanceTypes"].responses[200]
    specs = {"vcpus": 8, "memory_gib": 64, "storage_gib": 512, "gpus": True}
    kind = {"name": "a", "description": "", "gpu_description": "", "price_cents_per_hour": 1, "specs": specs}
    body = {"data": {"a": {"instance_type": kind, "regions_with_capacity_available": [{"name": "r"}]}}, "more": 1}
    assert {str(found) for found in find_faults(wanted, body)} == {
        "more: unknown field",
        "data.a.instance_type.specs.gpus: not of type integer",
        "data.a.regions_with_capacity_available[0].description: missing",
    }
    assert [str(found) for found in find_faults(schema("SSHKey")["properties"]["name"], "")] == [
        "shorter than 1 characters"
    ]
    assert [str(found) for found in find_faults(schema("InstanceStatus"), "gone")] == [
        "none of booting, active, unhealthy, terminated, terminating, preempted"
    ]


@needs_openapi
def test_the_digest_agrees_with_the_vendors_openapi() -> None:
    spec = importlib.util.spec_from_file_location("digest", ROOT / "tools" / "write_lambda_digest.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.render(json.loads(Path(str(OPENAPI)).read_text())) == tool.DIGEST.read_text()


@needs_openapi
def test_the_rate_limits_are_the_vendors() -> None:
    text = " ".join(json.loads(Path(str(OPENAPI)).read_text())["info"]["description"].split())
    assert "limited to one request per second" in text and lambda_api.REQUEST_INTERVAL_S == 1
    assert "limited to one request per 12 seconds" in text and lambda_api.LAUNCH_INTERVAL_S == 12

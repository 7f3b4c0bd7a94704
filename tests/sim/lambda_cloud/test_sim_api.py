"""The API of the simulator: every operation and refusal by the vendor's schema (tests/sim/lambda_cloud/conftest.py)."""

from __future__ import annotations

import base64
import http.client
from typing import Any

import pytest

from trainmaster.core.vendors.lambda_api import operations

pytestmark = pytest.mark.spawns
LAUNCH = "/api/v1/instance-operations/launch"
GOOD = {"region_name": "us-south-1", "instance_type_name": "gpu_1x_h100_sxm5", "ssh_key_names": ["key"]}


def test_every_operation_answers_by_the_schema(simulate) -> None:
    """Each of the digest once; the fixture asserts that no answer had a fault, here or by the vendor's own file."""
    account = simulate()
    types = account.get("/instance-types")
    assert types["gpu_8x_h100_sxm5"]["instance_type"]["specs"]["gpus"] == 8
    assert {one["name"] for one in types["gpu_8x_h100_sxm5"]["regions_with_capacity_available"]} <= {
        one["name"] for one in account.get("/regions")
    }
    image = account.get("/images")[0]
    made = account.post("/ssh-keys", {"name": "generated"})
    assert "PRIVATE KEY" in made["private_key"]
    assert [key["name"] for key in account.get("/ssh-keys")] == ["key", "generated"]
    disk = account.post("/filesystems", {"name": "disk", "region": "us-south-1"})
    instance = account.launch(image={"family": image["family"]}, file_system_names=["disk"], user_data="#cloud-config")
    account.wait(instance)
    assert [one["id"] for one in account.get("/instances")] == [instance]
    assert account.post(f"/instances/{instance}", {"name": "renamed"})["name"] == "renamed"
    account.post("/instance-operations/restart", {"instance_ids": [instance]})
    account.wait(instance)
    account.terminate(instance)
    account.wait(instance, "terminated")
    assert account.call("DELETE", f"/api/v1/filesystems/{disk['id']}")[0] == 200
    assert account.call("DELETE", f"/api/v1/ssh-keys/{made['id']}") == (200, {"data": {}})
    assert account.get("/file-systems") == []
    assert set(account.simulator.summary()["requests_by_operation"]) == set(operations())


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"instance_type_name": "gpu_9x"}, 404, "global/object-does-not-exist"),
        ({"region_name": "mars-1"}, 404, "global/object-does-not-exist"),
        ({"ssh_key_names": ["other"]}, 404, "global/object-does-not-exist"),
        ({"file_system_names": ["other"]}, 404, "global/object-does-not-exist"),
        ({"image": {"family": "other"}}, 404, "global/object-does-not-exist"),
        ({"region_name": "europe-central-1"}, 400, "instance-operations/launch/insufficient-capacity"),
        ({"file_system_names": ["far"]}, 400, "instance-operations/launch/file-system-in-wrong-region"),
        ({"ssh_key_names": []}, 400, "global/invalid-parameters"),
        ({"ssh_key_names": ["key", "key"]}, 400, "global/invalid-parameters"),
        ({"ssh_key_names": "key"}, 400, "global/invalid-parameters"),
        ({"name": "n" * 65}, 400, "global/invalid-parameters"),
        ({"hostname": "No_Host"}, 400, "global/invalid-parameters"),
        ({"tags": [{"key": "UPPER", "value": "v"}]}, 400, "global/invalid-parameters"),
        ({"tags": [{"key": "k", "value": "v" * 129}]}, 400, "global/invalid-parameters"),
        ({"user_data": "x" * 1_000_001}, 400, "global/invalid-parameters"),
        ({"quantity": 2}, 400, "global/invalid-parameters"),
    ],
)
def test_launches_that_are_refused(refusing: Any, change: dict[str, Any], status: int, code: str) -> None:
    answered, body = refusing.call("POST", LAUNCH, GOOD | change)
    assert (answered, body["error"]["code"]) == (status, code), body
    assert refusing.get("/instances") == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/instances/none", None, 404, "global/object-does-not-exist"),
        ("POST", "/instances/none", {"name": "n"}, 404, "global/object-does-not-exist"),
        ("POST", "/instance-operations/terminate", {"instance_ids": ["none"]}, 404, "global/object-does-not-exist"),
        ("POST", "/instance-operations/restart", {"instance_ids": ["none"]}, 404, "global/object-does-not-exist"),
        ("POST", "/instance-operations/terminate", {"instance_ids": []}, 400, "global/invalid-parameters"),
        ("POST", "/instance-operations/terminate", {}, 400, "global/invalid-parameters"),
        ("POST", "/instance-operations/terminate", b"{", 400, "global/invalid-parameters"),
        ("POST", "/instance-operations/terminate", b"", 400, "global/invalid-parameters"),
        ("POST", "/instance-operations/terminate", [1], 400, "global/invalid-parameters"),
        ("POST", "/ssh-keys", {"name": "key"}, 400, "global/invalid-parameters"),
        ("POST", "/ssh-keys", {"name": "new", "public_key": "nonsense"}, 400, "global/invalid-parameters"),
        ("POST", "/ssh-keys", {"name": ""}, 400, "global/invalid-parameters"),
        ("DELETE", "/ssh-keys/none", None, 404, "global/not-found"),
        ("POST", "/filesystems", {"name": "far", "region": "us-east-1"}, 400, "global/duplicate"),
        ("POST", "/filesystems", {"name": "near", "region": "mars-1"}, 400, "global/invalid-parameters"),
        ("POST", "/filesystems", {"name": "1st", "region": "us-east-1"}, 400, "global/invalid-parameters"),
        ("DELETE", "/filesystems/none", None, 404, "global/object-does-not-exist"),
        ("GET", "/nothing", None, 404, "global/not-found"),
        ("DELETE", "/instances", None, 404, "global/not-found"),
    ],
)
def test_requests_that_are_refused(refusing: Any, method: str, path: str, body: Any, status: int, code: str) -> None:
    answered, found = refusing.call(method, f"/api/v1{path}", body)
    assert (answered, found["error"]["code"]) == (status, code), found


def test_a_restart_of_a_booting_instance_conflicts(simulate) -> None:
    account = simulate(boot_s=1e6)
    instance = account.launch()
    status, body = account.call("POST", "/api/v1/instance-operations/restart", {"instance_ids": [instance]})
    assert (status, body["error"]["code"]) == (409, "global/conflict")


def test_capacity_and_quota_are_kept(simulate) -> None:
    account = simulate(capacity=1, quota=2, boot_s=1e6)
    account.launch()
    _, body = account.call("POST", LAUNCH, GOOD)
    assert body["error"]["code"] == "instance-operations/launch/insufficient-capacity"
    left = account.get("/instance-types")["gpu_1x_h100_sxm5"]["regions_with_capacity_available"]
    assert [one["name"] for one in left] == ["us-east-1"]
    account.launch(region_name="us-east-1")
    _, body = account.call("POST", LAUNCH, GOOD | {"instance_type_name": "gpu_8x_h100_sxm5"})
    assert body["error"]["code"] == "global/quota-exceeded"


def test_a_mounted_file_system_is_not_deleted(simulate) -> None:
    account = simulate(boot_s=1e6)
    disk = account.post("/filesystems", {"name": "disk", "region": "us-south-1"})
    account.launch(file_system_names=["disk"])
    status, body = account.call("DELETE", f"/api/v1/filesystems/{disk['id']}")
    assert (status, body["error"]["code"]) == (400, "filesystems/filesystem-in-use")


def test_termination_is_all_or_nothing_and_may_be_repeated(simulate) -> None:
    account = simulate(boot_s=1e6)
    instance = account.launch()
    status, _ = account.call("POST", "/api/v1/instance-operations/terminate", {"instance_ids": [instance, "none"]})
    assert status == 404 and account.get(f"/instances/{instance}")["status"] == "booting"
    for _ in range(2):
        account.terminate(instance, instance)
    account.wait(instance, "terminated")
    account.terminate(instance)


def test_an_ended_instance_leaves_the_listing_after_a_while(simulate) -> None:
    account = simulate(boot_s=1e6, listed_s=500)
    instance = account.launch()
    account.terminate(instance)
    account.until(lambda: account.get("/instances") == [])
    assert account.call("GET", f"/api/v1/instances/{instance}")[0] == 404
    assert [one["status"] for one in account.simulator.instances()] == ["terminated"]


def test_keys_are_taken_as_bearer_and_basic(simulate) -> None:
    account = simulate()
    key = account.authorization.removeprefix("Bearer ")
    encoded = base64.b64encode(f"{key}:".encode()).decode()
    for header in (f"Bearer {key}", f"Basic {encoded}", f"Basic {key}", f"bearer {key}"):
        assert account.call("GET", "/api/v1/regions", headers={"Authorization": header})[0] == 200
    for header in ("", key, "Bearer wrong", "Basic d3Jvbmc6", "Basic %", f"Digest {key}"):
        status, body = account.call("GET", "/api/v1/regions", headers={"Authorization": header})
        assert (status, body["error"]["code"]) == (401, "global/invalid-api-key")
        assert account.call("GET", "/sim/summary", headers={"Authorization": header})[0] == 401


def test_the_user_agent_of_urllib_is_refused(simulate) -> None:
    account = simulate()
    status, body = account.call("GET", "/api/v1/regions", headers={"User-Agent": "Python-urllib/3.11"})
    assert status == 403 and b"<html>" in body


def test_one_connection_serves_many_requests(simulate) -> None:
    account = simulate()
    connection = http.client.HTTPConnection(account.simulator.url.removeprefix("http://"), timeout=20)
    for _ in range(5):
        connection.request("GET", "/api/v1/regions", headers={"Authorization": account.authorization})
        assert connection.getresponse().read()
    connection.close()


def test_unknown_fields_are_ignored_and_counted(simulate) -> None:
    account = simulate(boot_s=1e6)
    account.launch(quantity=1, regoin="us-east-1")
    counted = account.simulator.summary()["unknown_fields"]
    assert counted == {"launchInstance.quantity": 1, "launchInstance.regoin": 1}

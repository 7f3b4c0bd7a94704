"""Operations of the API by the vendor's operationId. Each returns the `data` of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainmaster.sim.lambda_cloud.cloud import Cloud
from trainmaster.sim.lambda_cloud.errors import invalid
from trainmaster.sim.lambda_cloud.instance import Instance

Body = Mapping[str, Any]


def run(name: str, cloud: Cloud, *, path_id: str, body: Body) -> Any:
    """The `data` of the answer to a request that fits the schema; ApiError refuses."""
    with cloud.lock:
        return _OPERATIONS[name](cloud, path_id, body)


def _list_types(cloud: Cloud) -> Any:
    return {
        name: {
            "instance_type": kind.body(),
            "regions_with_capacity_available": [
                cloud.catalog.region(region)
                for region in kind.regions
                if cloud.has_capacity(kind, region) and not cloud.faults.happens("capacity-hidden")
            ],
        }
        for name, kind in cloud.catalog.types.items()
    }


def _rename_instance(cloud: Cloud, instance_id: str, body: Body) -> Any:
    instance = cloud.find(instance_id)
    if "name" not in body:
        raise invalid("name: missing.")
    if instance.foreign:
        cloud.foreign_touched.append(f"rename {instance.id}")
    instance.name = str(body["name"])
    return _show(cloud, [instance])[0]


def _delete_ssh_key(cloud: Cloud, key_id: str) -> Any:
    cloud.ssh_keys.delete(key_id)
    return {}


def _delete_file_system(cloud: Cloud, file_system_id: str) -> Any:
    cloud.file_systems.delete(file_system_id, cloud.is_mounted)
    return {"deleted_ids": [file_system_id]}


def _show(cloud: Cloud, instances: Sequence[Instance]) -> list[dict[str, Any]]:
    return [instance.body(cloud.catalog, cloud.clock.now_s()) for instance in instances]


_OPERATIONS: Mapping[str, Callable[[Cloud, str, Body], Any]] = {
    "listInstanceTypes": lambda cloud, _, __: _list_types(cloud),
    "listInstances": lambda cloud, _, __: _show(cloud, cloud.listed()),
    "getInstance": lambda cloud, path_id, _: _show(cloud, [cloud.find(path_id)])[0],
    "postInstance": _rename_instance,
    "launchInstance": lambda cloud, _, body: {"instance_ids": [cloud.launch(body).id]},
    "terminateInstance": lambda cloud, _, body: {
        "terminated_instances": _show(cloud, cloud.terminate(body["instance_ids"]))
    },
    "restartInstance": lambda cloud, _, body: {
        "restarted_instances": _show(cloud, cloud.restart(body["instance_ids"]))
    },
    "listSSHKeys": lambda cloud, _, __: cloud.ssh_keys.list(),
    "addSSHKey": lambda cloud, _, body: cloud.ssh_keys.add(body["name"], body.get("public_key")),
    "deleteSSHKey": lambda cloud, path_id, _: _delete_ssh_key(cloud, path_id),
    "listFilesystems": lambda cloud, _, __: cloud.file_systems.list(cloud.is_mounted),
    "createFilesystem": lambda cloud, _, body: cloud.file_systems.create(body["name"], body["region"]),
    "filesystemDelete": lambda cloud, path_id, _: _delete_file_system(cloud, path_id),
    "listImages": lambda cloud, _, __: list(cloud.catalog.images),
    "listRegions": lambda cloud, _, __: [cloud.catalog.region(name) for name in cloud.catalog.regions],
}

"""Operations of the API, one function each, by the vendor's operationId. Each returns the `data` of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainmaster.sim.lambda_cloud.cloud import Cloud
from trainmaster.sim.lambda_cloud.errors import invalid
from trainmaster.sim.lambda_cloud.instance import Instance

Body = Mapping[str, Any]


def run(name: str, cloud: Cloud, *, path_id: str, body: Body) -> Any:
    """The `data` of the answer to a request that fits the schema; ApiError refuses."""
    return _OPERATIONS[name](cloud, path_id, body)


def _list_types(cloud: Cloud, _: str, __: Body) -> Any:
    with cloud.lock:
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


def _list_instances(cloud: Cloud, _: str, __: Body) -> Any:
    return [_show(cloud, instance) for instance in cloud.listed()]


def _get_instance(cloud: Cloud, instance_id: str, _: Body) -> Any:
    return _show(cloud, cloud.find(instance_id))


def _rename_instance(cloud: Cloud, instance_id: str, body: Body) -> Any:
    with cloud.lock:
        instance = cloud.find(instance_id)
        if "name" not in body:
            raise invalid("name: missing.")
        if instance.foreign:
            cloud.foreign_touched.append(f"rename {instance.id}")
        instance.name = str(body["name"])
        return _show(cloud, instance)


def _launch(cloud: Cloud, _: str, body: Body) -> Any:
    return {"instance_ids": [cloud.launch(body).id]}


def _terminate(cloud: Cloud, _: str, body: Body) -> Any:
    instances = cloud.terminate(body["instance_ids"])
    return {"terminated_instances": [_show(cloud, instance) for instance in instances]}


def _restart(cloud: Cloud, _: str, body: Body) -> Any:
    instances = cloud.restart(body["instance_ids"])
    return {"restarted_instances": [_show(cloud, instance) for instance in instances]}


def _list_ssh_keys(cloud: Cloud, _: str, __: Body) -> Any:
    with cloud.lock:
        return cloud.ssh_keys.list()


def _add_ssh_key(cloud: Cloud, _: str, body: Body) -> Any:
    with cloud.lock:
        return cloud.ssh_keys.add(body["name"], body.get("public_key"))


def _delete_ssh_key(cloud: Cloud, key_id: str, _: Body) -> Any:
    with cloud.lock:
        cloud.ssh_keys.delete(key_id)
    return {}


def _list_file_systems(cloud: Cloud, _: str, __: Body) -> Any:
    with cloud.lock:
        return cloud.file_systems.list(cloud.is_mounted)


def _create_file_system(cloud: Cloud, _: str, body: Body) -> Any:
    with cloud.lock:
        return cloud.file_systems.create(body["name"], body["region"])


def _delete_file_system(cloud: Cloud, file_system_id: str, _: Body) -> Any:
    with cloud.lock:
        cloud.file_systems.delete(file_system_id, cloud.is_mounted)
    return {"deleted_ids": [file_system_id]}


def _list_images(cloud: Cloud, _: str, __: Body) -> Any:
    return list(cloud.catalog.images)


def _list_regions(cloud: Cloud, _: str, __: Body) -> Any:
    return [cloud.catalog.region(name) for name in cloud.catalog.regions]


def _show(cloud: Cloud, instance: Instance) -> dict[str, Any]:
    with cloud.lock:
        return instance.body(cloud.catalog, cloud.clock.now_s())


_OPERATIONS: Mapping[str, Callable[[Cloud, str, Body], Any]] = {
    "listInstanceTypes": _list_types,
    "listInstances": _list_instances,
    "getInstance": _get_instance,
    "postInstance": _rename_instance,
    "launchInstance": _launch,
    "terminateInstance": _terminate,
    "restartInstance": _restart,
    "listSSHKeys": _list_ssh_keys,
    "addSSHKey": _add_ssh_key,
    "deleteSSHKey": _delete_ssh_key,
    "listFilesystems": _list_file_systems,
    "createFilesystem": _create_file_system,
    "filesystemDelete": _delete_file_system,
    "listImages": _list_images,
    "listRegions": _list_regions,
}

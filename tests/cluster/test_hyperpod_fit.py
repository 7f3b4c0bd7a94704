"""The HyperPod test job follows the nodes of a cluster; what a user wrote into its manifest stays."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.checks import profiles
from trainmaster.cluster.hyperpod import fit, indicators, manifest
from trainmaster.core import gpus
from trainmaster.estimate import estimate

GPUS = {
    "A10G": ("ml.g5.8xlarge", 8, "llama3.2-1b"), "A100-SXM4-40GB": ("ml.p4d.24xlarge", 2, "llama3.1-8b"),
    "A100-SXM4-80GB": ("ml.p4de.24xlarge", 2, "llama3.1-8b"), "H100-SXM": ("ml.p5.48xlarge", 2, "llama3.1-8b"),
    "H200": ("ml.p5en.48xlarge", 1, "llama3.1-8b"), "B200": ("ml.p6-b200.48xlarge", 16, "llama3.1-8b"),
}  # fmt: skip


def nodes_of(instance: str, count: int, **labels: str) -> list[dict[str, Any]]:
    known = profiles.find_instance(instance)
    assert known is not None
    has = {fit.GPU_RESOURCE: str(known.gpus), "vpc.amazonaws.com/efa": str(known.efa_devices)}
    return [{"metadata": {"labels": {fit.TYPE_LABEL: instance, **labels}}, "status": {"capacity": has}}] * count


@pytest.mark.parametrize("gpu", GPUS)
def test_the_shipped_job_follows_the_nodes_and_fits_its_own_limits(gpu: str) -> None:
    instance, count, model = GPUS[gpu]
    found = fit.find(nodes_of(instance, count))
    assert found is not None and found.gpu is gpus.find_gpu(gpu)
    fitted = fit.fit(manifest.make(), found)
    config, job = fit.read_config(fitted.objects), manifest.find_checked_job(fitted.objects)
    assert config is not None and config.model.name == model, fitted.note
    pods = min(8, count)
    container = manifest.pod_template(job)["spec"]["containers"][0]
    assert manifest.count_pods(job) == pods and f"--nnodes={pods}" in container["command"]
    assert container["resources"]["limits"] == {
        fit.GPU_RESOURCE: str(found.gpus_per_node), "vpc.amazonaws.com/efa": str(found.efa_per_node),
    }  # fmt: skip
    ranks = pods * found.gpus_per_node
    assert config.batch_sequences == ranks and not list(config.faults_on(ranks)), "one sequence a GPU"
    cluster = fit.make_cluster(found.gpu, pods=pods, per_pod=found.gpus_per_node)
    planned = estimate(config, cluster)
    assert planned.fits and planned.memory.needed < indicators.MEMORY_LIMIT_GIB * 2**30
    assert fitted.budget is not None and fitted.budget.step_s * 6 <= 60, "four losses in the minute of the quick test"
    assert config.checkpoint.every_steps * fitted.budget.step_s >= 60, "no save begins before the one before is written"
    assert fitted.budget.watch_s(indicators.QUICK) <= 60 and fitted.budget.watch_s(indicators.FULL) <= 300
    assert fitted.budget.read_s >= planned.memory.checkpoint / 1e8


def test_what_a_user_wrote_stays_and_the_rest_follows() -> None:
    made = manifest.make(nodes=4, train={"model": {"preset": "llama3.2-3b"}})
    job = manifest.find_checked_job(made)
    spec = job["spec"]["replicaSpecs"][0]["template"]["spec"]
    spec |= {"nodeSelector": {"zone": "a"}, "serviceAccountName": "mine"}
    spec["containers"][0]["image"] = "registry/mine:1"
    spec["containers"][0]["command"].append("--log-level=DEBUG")
    spec["containers"][0]["env"].append({"name": "MINE", "value": "1"})
    fitted = fit.fit(made, fit.find(nodes_of("ml.p5.48xlarge", 5)))
    config, job = fit.read_config(fitted.objects), manifest.find_checked_job(fitted.objects)
    assert config is not None and config.model.name == "llama3.2-3b" and manifest.count_pods(job) == 4
    spec = manifest.pod_template(job)["spec"]
    container = spec["containers"][0]
    assert (spec["nodeSelector"], spec["serviceAccountName"], container["image"]) == (
        {"zone": "a"}, "mine", "registry/mine:1",
    )  # fmt: skip
    assert container["resources"]["limits"][fit.GPU_RESOURCE] == "8" and config.batch_sequences == 32
    assert "--nproc-per-node=8" in container["command"] and container["command"][-1] == "--log-level=DEBUG"
    assert container["env"][-1] == {"name": "MINE", "value": "1"} and "llama3.2-3b on 32 × H100-SXM" in fitted.note


def test_what_the_nodes_do_not_have_is_left_out_of_an_edited_manifest_too() -> None:
    made = list(reversed(manifest.make()))
    container = manifest.pod_template(manifest.find_checked_job(made))["spec"]["containers"][0]
    container["resources"]["limits"]["memory"] = "100Gi"
    fitted = fit.fit(made, fit.find(nodes_of("ml.g5.12xlarge", 2) + nodes_of("ml.g5.2xlarge", 1)))
    container = manifest.pod_template(manifest.find_checked_job(fitted.objects))["spec"]["containers"][0]
    assert container["resources"] == {"limits": {fit.GPU_RESOURCE: "1", "memory": "100Gi"},
                                      "requests": {fit.GPU_RESOURCE: "1"}}  # fmt: skip
    assert "on 3 × A10G on 3 nodes" in fitted.note, "the smallest node decides"


def test_nothing_is_changed_where_the_gpus_or_the_trainer_are_not_known() -> None:
    made = manifest.make()
    job = {**manifest.find_checked_job(made), "kind": "PyTorchJob"}
    assert fit.fit([made[0], job], fit.find(nodes_of("ml.p5.48xlarge", 2))).objects == [made[0], job]
    for found in (None, fit.find([]), fit.find(nodes_of("ml.p5.48xlarge", 1, **{fit.TYPE_LABEL: "x"}))):
        fitted = fit.fit(made, found)
        assert (fitted.objects, fitted.budget) == (made, None) and "taken as it is" in fitted.note
    other = [item for item in made if item["kind"] != "ConfigMap"]
    assert fit.fit(other, fit.find(nodes_of("ml.p5.48xlarge", 1))) == fit.Fit(objects=other, note="")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("NVIDIA-A10G", "A10G"), ("NVIDIA-H100-80GB-HBM3", "H100-SXM"), ("NVIDIA-A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("Tesla-T4", "T4"), ("NVIDIA-X9", None),
    ],
)  # fmt: skip
def test_the_gpu_of_a_node_is_known_by_its_product_label(label: str, name: str | None) -> None:
    found = fit.find_model({fit.PRODUCT_LABEL: label})
    assert (found.name if found is not None else None) == name

"""Cost of polling many jobs on a cluster.

    PYTHONPATH=tests python benchmarks/targets.py --only slurm [--jobs 500]
    PYTHONPATH=tests python benchmarks/targets.py --only kubernetes [--jobs 500]

slurm: a real Slurm (make system-packages) with so many jobs in its queue. All of them are polled through the target:
one squeue serves every poll of the round. Then the two shapes of output are parsed without Slurm.

kubernetes: a real API server (make testbed-k8s) with so many Jobs of two pods each. The first poll lists; every later
one reads what the watch has brought. Then ten pods change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {}


def section(work: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    SECTIONS[work.__name__] = work
    return work


@section
def slurm(options: argparse.Namespace) -> None:
    from slurm import start

    with tempfile.TemporaryDirectory() as folder, start(Path(folder), extra="MaxJobCount=5000\n") as cluster:
        submit = (
            f"for i in $(seq {options.jobs}); do sbatch --hold --parsable -o /dev/null /dev/stdin <<'E' || exit 1\n"
        )
        script = submit + "#!/bin/sh\ntrue\nE\ndone"
        began = time.perf_counter()
        out = subprocess.run(["bash", "-c", script], env=cluster.env, check=True, capture_output=True, text=True).stdout
        print(f"submitted {options.jobs} jobs in {time.perf_counter() - began:.1f} s")
        for output in ("text", "json"):
            asyncio.run(_poll_slurm(str(cluster.conf), Path(folder), out.split(), output))
    _parse_slurm(options.jobs)


async def _poll_slurm(conf: str, folder: Path, jobs: list[str], output: str) -> None:
    from trainmaster.targets.slurm.queue import queue
    from trainmaster.targets.slurm.settings import parse_settings
    from trainmaster.targets.slurm.target import Slurm

    document = {"folder": str(folder / "shared"), "env": {"SLURM_CONF": conf}, "output": output, "poll_s": 60}
    target = Slurm(parse_settings(document, folder))
    for name in ("first", "second"):
        before, began = queue(target.settings).listings, time.perf_counter()
        handles = [{"attempt": "a", "base": "/none", "nodes": 1, "tasks": None, "slurm_job": job} for job in jobs]
        states = {(await target.poll(handle)).state.value for handle in handles}
        took, made = time.perf_counter() - began, queue(target.settings).listings - before
        print(f"{output}: {name} poll of {len(jobs)} jobs: {took:.3f} s, {made} listings; {', '.join(states)}")


def _parse_slurm(count: int) -> None:
    from trainmaster.remote.slurm import parse

    cells = ("RUNNING", "n[1-64]", "/shared/jobs/x/attempts/1", "None", "llama-8b.x", "trainmaster:x")
    text = "".join(parse.SEPARATOR.join((str(number), *cells)) + "\n" for number in range(1, count + 1))
    filler = {f"field_{number}": {"set": True, "infinite": False, "number": number} for number in range(120)}
    job = {"job_state": ["RUNNING"], "nodes": "n[1-64]", "name": "llama-8b.x", "comment": "trainmaster:x", **filler}
    whole = json.dumps({"jobs": [{"job_id": number, "array_job_id": 0, **job} for number in range(1, count + 1)]})
    for name, read, data in (("text", parse.parse_squeue, text), ("JSON", parse.parse_squeue_json, whole)):
        began = time.perf_counter()
        found = read(data)
        print(f"parse {len(found)} jobs of {name} ({len(data) / 1e6:.2f} MB): {time.perf_counter() - began:.3f} s")


@section
def kubernetes(options: argparse.Namespace) -> None:
    from kube import serve

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kube"
        place.mkdir()
        with serve(place, more=("--disable-admission-plugins=ServiceAccount",)) as kube:
            asyncio.run(_poll_kubernetes(kube, Path(folder), options.jobs))


async def _poll_kubernetes(kube: object, folder: Path, count: int) -> None:
    import yaml

    from kube import Kube
    from trainmaster import targets
    from trainmaster.core.spec import parse_spec
    from trainmaster.targets.kubernetes.states import trim_pod
    from trainmaster.targets.kubernetes.target import Kubernetes

    assert isinstance(kube, Kube)
    settings = folder / "cluster.yaml"
    document = {
        "kubeconfig": str(kube.kubeconfig()),
        "image": "x:1",
        "gpus": 0,
        "kind": "pytorchjob",
        "package": "image",
    }
    settings.write_text(yaml.safe_dump(document))
    target = Kubernetes(settings)
    spec = parse_spec({"name": "a", "command": ["true"], "resources": {"nodes": 2}})
    handles = []
    for _ in range(count):
        placement = targets.Placement(attempt=f"{uuid.uuid4()}.1", spec=spec, job_folder=folder / uuid.uuid4().hex)
        submission = target.plan(placement)
        handles.append(await target.submit(submission))
        for node in (0, 1):
            _make_pod(kube, submission.handle, submission.files, node)
    listed = kube.call("GET", "/api/v1/namespaces/default/pods")
    text = json.dumps(listed)
    began = time.perf_counter()
    for pod in json.loads(text)["items"]:
        trim_pod(pod)
    print(f"parse {len(listed['items'])} pods ({len(text) / 1e6:.1f} MB): {time.perf_counter() - began:.3f} s")
    for name in ("first poll of all", "second poll of all"):
        began = time.perf_counter()
        states = {(await target.poll(handle)).state.value for handle in handles}
        took = time.perf_counter() - began
        print(f"{name} {count} jobs: {took:.3f} s, {1e6 * took / count:.0f} us each; {', '.join(states)}")
    session = target._session(handles[0])
    lists, changes = session.jobs.lists + session.pods.lists, session.pods.changes
    print(f"lists {lists}, changes of pods {changes}")
    names = [pod["metadata"]["name"] for pod in listed["items"][:10]]
    for name in names:
        path = f"/api/v1/namespaces/default/pods/{name}/status"
        kube.call("PATCH", path, {"status": {"phase": "Failed"}}, kind="application/merge-patch+json")
    while session.pods.changes < changes + len(names):  # noqa: ASYNC110 (a counter has no event)
        await asyncio.sleep(0.01)
    more = session.jobs.lists + session.pods.lists - lists
    print(f"10 pods changed: {session.pods.changes - changes} changes, {more} lists")
    await targets.close()


def _make_pod(kube: object, handle: object, files: object, node: int) -> None:
    import yaml

    from kube import Kube

    assert isinstance(kube, Kube) and isinstance(handle, dict) and isinstance(files, dict)
    (text,) = files.values()
    job = list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))[-1]
    template = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    metadata = {**template["metadata"], "name": f"{handle['name']}-{node}"}
    kube.call("POST", "/api/v1/namespaces/default/pods", {"metadata": metadata, "spec": template["spec"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(SECTIONS), help="one section")
    parser.add_argument("--jobs", type=int, default=500)
    options = parser.parse_args()
    for name, work in SECTIONS.items():
        if options.only in (None, name):
            print(f"== {name}")
            work(options)


if __name__ == "__main__":
    main()

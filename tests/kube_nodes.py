"""A whole Kubernetes cluster for tests: two nodes or three, each a kubelet with a containerd, in a namespace.

Pods see the programs of this machine read-only (`/usr`, Python and its packages), so that an image of a few folders is
enough. Needs root. A stand-in for the Kubeflow operator makes the pods of PyTorchJobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kube_dns
from kube import Kube, program, serve

GPUS = 2  # fake ones of each node
IMAGE = "localhost/machine:1"
BASE_IMAGE = "localhost/python:1"  # has this machine's Python and packages, where they are mounted
_NODES = ("node-a", "node-b")
_THIRD = "node-c"  # only where a test asks for it
_LOCK = Path(tempfile.gettempdir(), "trainmaster-kube-nodes.lock")
_PROGRAMS = ("containerd", "ctr", "runc", "busybox", "nsenter", "unshare", "ip")
_MERGE = "application/merge-patch+json"


@dataclass(kw_only=True)
class Cluster:
    """The running cluster."""

    kube: Kube
    netns: str
    kubelets: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    runtimes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_kubelet(self, number: int) -> None:
        name, folder = (*_NODES, _THIRD)[number], self.kube.folder
        words = [
            program("kubelet"), f"--config={folder}/kubelet-{number}.yaml", f"--kubeconfig={self.kube.kubeconfig()}",
            "--container-runtime=remote", f"--container-runtime-endpoint=unix://{folder}/ctd-{number}.sock",
            f"--root-dir={folder}/kubelet-{number}", f"--cert-dir={folder}/kubelet-certs-{number}",
            f"--hostname-override={name}", f"--node-ip=10.245.0.{number + 1}",
        ]  # fmt: skip
        inside = [*self.inside(), f"--mount=/proc/{self.runtimes[number].pid}/ns/mnt"]
        self.kubelets[name] = self.kube.start(f"kubelet-{number}", *inside, *words)

    def start_runtime(self, number: int) -> None:
        """containerd with a /var/log/pods of its own: a kubelet removes the logs there that are not of its pods."""
        folder = self.kube.folder
        logs = folder / f"logs-{number}"
        logs.mkdir()
        own = 'mkdir -p /var/log/pods && mount --bind "$0" /var/log/pods && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", own, str(logs), "containerd", "-c", f"{folder}/ctd-{number}.toml"]
        self.runtimes[number] = self.kube.start(f"ctd-{number}", *self.inside(), *words)

    @contextlib.contextmanager
    def third_node(self) -> Iterator[str]:
        """One more node for a while; its name."""
        number, folder = len(_NODES), self.kube.folder
        _write_node(folder, number, None)
        self.start_runtime(number)
        _import_images(folder, number, folder / "images.tar")
        self.start_kubelet(number)
        try:
            self.wait_ready(_THIRD)
            yield _THIRD
        finally:
            _clean(folder, number)
            for child in (self.kubelets.pop(_THIRD), self.runtimes.pop(number)):
                child.kill()
                child.wait()
            with contextlib.suppress(urllib.error.HTTPError):
                self.kube.call("DELETE", f"/api/v1/nodes/{_THIRD}")

    def wait_ready(self, name: str) -> None:
        _wait_ready(self.kube, name)

    def import_images(self, archive: Path) -> None:
        """Put the images of an archive on every node."""
        for number in range(len(_NODES)):
            _import_images(self.kube.folder, number, archive)

    def inside(self) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.netns}"]

    def settings(self, namespace: str, **more: Any) -> dict[str, Any]:
        """Settings whose pods have this machine's Python."""
        volumes = [{"mount": one, "host_path": one, "read_only": True} for one in python_folders()]
        shared = self.kube.folder / "shared"
        shared.mkdir(exist_ok=True)
        shared.chmod(0o777)
        path = os.pathsep.join(one for one in packages())
        return {
            "kubeconfig": str(self.kube.kubeconfig()), "namespace": namespace, "image": IMAGE, "gpus": 0, "shm": "64Mi",
            "python": os.path.realpath(sys.executable), "env": {"PYTHONPATH": path}, "lost_after_s": 3,
            "volumes": [*volumes, {"mount": "/shared", "host_path": str(shared)}], "folder": "/shared", **more,
        }  # fmt: skip


def python_folders() -> list[str]:
    """What a container must see of this machine to run its Python."""
    folders = ["/usr", *dict.fromkeys([sys.base_prefix, *packages()])]
    return [one for one in folders if one == "/usr" or not one.startswith("/usr/")]


def packages() -> list[str]:
    found = [
        one for one in [*site.getsitepackages(), *sys.path] if one.endswith("site-packages") and Path(one).is_dir()
    ]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def cluster(given: Sequence[tuple[str, str]] = (), devices: Sequence[tuple[str, int, int]] = ()) -> Iterator[Cluster]:
    """Run the cluster; skips where that is not possible.

    `given`: folders of this machine, with their places, that every container gets, and `devices`: character devices, as
    the container runtime of a GPU vendor adds them. No manifest names them.
    """
    if os.geteuid() != 0:
        pytest.skip("kubelets need root")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here: make system-packages (as root)")
    for name in ("kubelet", "kube-scheduler", "kube-controller-manager"):
        program(name)
    with _one_at_a_time():
        yield from _run_cluster(given, devices)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait until no other cluster of these tests runs on this machine: two are too slow for the tests' time limits."""
    with _LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"\nwaiting for {_LOCK}: another run of the tests has a cluster of kubelets", file=sys.__stderr__)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run_cluster(given: Sequence[tuple[str, str]], devices: Sequence[tuple[str, int, int]]) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="kubes", dir="/tmp"))  # short: sockets have 100 characters
    netns, before = folder.name, _pod_networks()
    try:
        server = _make_network(netns)
        with serve(folder, address=server, inside=("nsenter", f"--net=/run/netns/{netns}"),
                   more=("--kubelet-preferred-address-types=InternalIP",)) as kube:  # fmt: skip
            made = Cluster(kube=kube, netns=netns)
            spec = _write_spec(folder, given, devices) if given or devices else None
            _start(made, spec)
            stop = threading.Event()
            operator = threading.Thread(target=_operate, args=(kube, stop), daemon=True)
            operator.start()
            try:
                yield made
            finally:
                stop.set()
                operator.join(10)
                for number in range(len(_NODES)):
                    _clean(folder, number)
    finally:
        for name in (netns, *(_pod_networks() - before)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _pod_networks() -> set[str]:
    """Network namespaces of pods; those of pods on a lost node are left behind."""
    place = Path("/run/netns")
    return {one.name for one in place.iterdir() if one.name.startswith("cni-")} if place.is_dir() else set()


def _make_network(netns: str) -> str:
    """A namespace with addresses for two nodes, reached over one pair of interfaces; the address of the server there.

    Nothing leads further. Each cluster takes a subnet of its own: two may run at once.
    """
    # Two that begin at the same moment would take the same one: nothing is routed to the later.
    with Path(tempfile.gettempdir(), "trainmaster-kubes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _take_subnet(netns)


def _take_subnet(netns: str) -> str:
    here, there = f"tm{netns[-6:]}", "eth0"
    taken = subprocess.run(["ip", "-4", "route"], check=True, capture_output=True, text=True).stdout
    subnet = next(one for number in range(1, 250) if f"{(one := f'10.245.{number}')}." not in taken)
    for words in (
        f"ip netns add {netns}", f"ip link add {here} type veth peer name {there} netns {netns}",
        f"ip addr add {subnet}.1/30 dev {here}", f"ip link set {here} up",
        f"ip -n {netns} addr add {subnet}.2/30 dev {there}", f"ip -n {netns} link set {there} up",
        f"ip -n {netns} link set lo up", f"ip -n {netns} addr add 10.245.0.1/32 dev lo",
        f"ip -n {netns} addr add 10.245.0.2/32 dev lo", f"ip -n {netns} addr add 10.245.0.3/32 dev lo",
        f"nsenter --net=/run/netns/{netns} sysctl -qw net.ipv4.ip_forward=1",
    ):  # fmt: skip
        subprocess.run(words.split(), check=True, capture_output=True)
    return f"{subnet}.2"


def _write_spec(folder: Path, given: Sequence[tuple[str, str]], devices: Sequence[tuple[str, int, int]]) -> Path:
    """containerd's own base of every container, with the folders and devices added."""
    spec = json.loads(subprocess.run(["ctr", "oci", "spec"], check=True, capture_output=True).stdout)
    spec["mounts"] += [
        {"destination": place, "type": "bind", "source": source, "options": ["rbind", "ro"]} for source, place in given
    ]
    linux = spec["linux"]
    for path, major, minor in devices:
        device = {"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666, "uid": 0, "gid": 0}
        linux.setdefault("devices", []).append(device)
        rule = {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"}
        linux.setdefault("resources", {}).setdefault("devices", []).append(rule)
    path = folder / "base-spec.json"
    path.write_text(json.dumps(spec))
    return path


def _start(made: Cluster, spec: Path | None) -> None:
    kube, folder = made.kube, made.kube.folder
    config = kube.kubeconfig()
    kube.start(
        "kcm", *made.inside(), program("kube-controller-manager"), f"--kubeconfig={config}",
        f"--service-account-private-key-file={folder}/sa.key", f"--root-ca-file={folder}/certs/apiserver.crt",
        "--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=16257", "--port=0",
        f"--cert-dir={folder}/kcm", "--node-monitor-grace-period=12s", "--node-monitor-period=2s",
    )  # fmt: skip
    kube.start(
        "scheduler", *made.inside(), program("kube-scheduler"), f"--kubeconfig={config}", "--leader-elect=false",
        "--bind-address=127.0.0.1", "--secure-port=16259", "--port=0", f"--cert-dir={folder}/sch",
    )  # fmt: skip
    kube.start("dns", *made.inside(), sys.executable, kube_dns.__file__, str(config))
    archive = write_images(folder)
    for number in range(len(_NODES)):
        _write_node(folder, number, spec)
        made.start_runtime(number)
        _import_images(folder, number, archive)
        made.start_kubelet(number)
    for name in _NODES:
        _wait_ready(kube, name)
        capacity = {"status": {"capacity": {"nvidia.com/gpu": str(GPUS)}}}
        kube.call("PATCH", f"/api/v1/nodes/{name}/status", capacity, kind=_MERGE)


def _import_images(folder: Path, number: int, archive: Path) -> None:
    _try(["ctr", "-a", f"{folder}/ctd-{number}.sock", "-n", "k8s.io", "images", "import", str(archive)])


def _try(words: list[str]) -> None:
    """Run a command until it works: a daemon that it talks to comes up."""
    end = time.monotonic() + 60
    while subprocess.run(words, capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < end, subprocess.run(words, capture_output=True, check=False)
        time.sleep(0.2)


def _wait_ready(kube: Kube, name: str) -> None:
    end = time.monotonic() + 120
    while True:
        assert time.monotonic() < end, (kube.folder / "kubelet-0.log").read_text()[-3000:]
        with contextlib.suppress(OSError):  # an HTTPError too: it is not there yet, or a busy server did not answer
            node = kube.call("GET", f"/api/v1/nodes/{name}")
            if any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"]["conditions"]):
                return
        time.sleep(0.3)


def _write_node(folder: Path, number: int, spec: Path | None) -> None:
    state = folder / f"ctd-{number}"
    state.mkdir()
    net = state / "net.d"
    net.mkdir()
    ipam = {
        "type": "host-local", "ranges": [[{"subnet": f"10.244.{number}.0/24"}]], "dataDir": f"{state}/ipam",
        "routes": [{"dst": "10.0.0.0/8"}],
    }  # fmt: skip
    bridge = {"type": "bridge", "bridge": f"cnitm{number}", "isGateway": True, "ipMasq": False, "ipam": ipam}
    (net / "10-br.conflist").write_text(json.dumps({"cniVersion": "0.4.0", "name": "br", "plugins": [bridge]}))
    plugin = 'plugins."io.containerd.grpc.v1.cri"'
    (folder / f"ctd-{number}.toml").write_text(
        f'version = 2\nroot = "{state}/root"\nstate = "{state}/state"\n'
        f'[grpc]\n  address = "{folder}/ctd-{number}.sock"\n'
        f'[{plugin}]\n  sandbox_image = "localhost/pause:1"\n  restrict_oom_score_adj = true\n'
        f'[{plugin}.cni]\n  bin_dir = "/usr/lib/cni"\n  conf_dir = "{net}"\n'
        f'[{plugin}.containerd]\n  default_runtime_name = "runc"\n  snapshotter = "overlayfs"\n'
        f'[{plugin}.containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
        + (f'  base_runtime_spec = "{spec}"\n' if spec is not None else "")
    )
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": f"10.245.0.{number + 1}", "port": 16250 + number, "healthzPort": 16240 + number, "readOnlyPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"}, "cgroupDriver": "cgroupfs", "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [], "failSwapOn": False, "oomScoreAdj": 0, "nodeStatusUpdateFrequency": "2s",
        "imageGCHighThresholdPercent": 100, "makeIPTablesUtilChains": False, "protectKernelDefaults": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "containerLogMaxSize": "256Ki", "containerLogMaxFiles": 2, "syncFrequency": "5s",
        "clusterDNS": [kube_dns.ADDRESS], "clusterDomain": kube_dns.DOMAIN,
    }  # fmt: skip
    (folder / f"kubelet-{number}.yaml").write_text(json.dumps(settings))


def write_images(folder: Path) -> Path:
    """Images of one layer: this machine's folders to mount on, the same with its Python, and busybox as the sandbox."""
    import hashlib

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for name in ("bin", "lib", "lib64", "sbin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        for name, mode in (("usr", 0o755), ("tmp", 0o1777), ("etc", 0o755), ("root", 0o755), ("pause", 0o755)):
            place = tarfile.TarInfo(name)
            place.type, place.mode = tarfile.DIRTYPE, mode
            archive.addfile(place)
        archive.add(os.path.realpath(shutil.which("busybox") or ""), "pause/busybox")
        archive.add("/etc/ld.so.cache", "etc/ld.so.cache")
        text = b"root:x:0:0::/root:/bin/sh\ntrain:x:1000:1000::/tmp:/bin/sh\n"
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(text)
        archive.addfile(passwd, io.BytesIO(text))
    data = layer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    manifest, files = [], {"layer.tar": data}
    python = [f"PATH={sys.base_prefix}/bin:/usr/sbin:/usr/bin", f"PYTHONPATH={os.pathsep.join(packages())}"]
    pip = ["PIP_NO_INDEX=1", "PIP_NO_BUILD_ISOLATION=0", "PIP_DISABLE_PIP_VERSION_CHECK=1"]
    images: dict[str, dict[str, list[str]]] = {
        IMAGE: {"Entrypoint": ["/bin/sh"]},
        BASE_IMAGE: {"Entrypoint": ["/bin/sh"], "Env": [*python, *pip]},
        "localhost/pause:1": {"Entrypoint": ["/pause/busybox", "sleep", "1000000000"]},
    }
    for name, settings in images.items():
        config = {
            "architecture": architecture, "os": "linux", "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}, "history": [{"created_by": "a test"}],
        }  # fmt: skip
        file = f"{len(manifest)}.json"
        files[file] = json.dumps(config).encode()
        manifest.append({"Config": file, "RepoTags": [name], "Layers": ["layer.tar"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    path = folder / "images.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def _operate(kube: Kube, stop: threading.Event) -> None:
    """Make the pods of PyTorchJobs as Kubeflow's operator does, with an address in place of its DNS name."""
    while not stop.wait(0.2):
        try:
            jobs = kube.call("GET", "/apis/kubeflow.org/v1/pytorchjobs")["items"]
            for job in jobs:
                _reconcile(kube, job)
        except (urllib.error.HTTPError, OSError, KeyError):
            continue


def _reconcile(kube: Kube, job: dict[str, Any]) -> None:
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    total = sum(one.get("replicas", 1) for one in replicas.values())
    pods = f"/api/v1/namespaces/{namespace}/pods"
    found = {one["metadata"]["name"]: one for one in kube.call("GET", pods)["items"]}
    master = found.get(f"{name}-master-0")
    if master is None:
        own = {"name": "MASTER_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        _make_pod(kube, job, "Master", 0, [own], total)
        return
    address = master["status"].get("podIP")
    for index in range(replicas.get("Worker", {}).get("replicas", 0)):
        if address and f"{name}-worker-{index}" not in found:
            _make_pod(kube, job, "Worker", index, [{"name": "MASTER_ADDR", "value": address}], total)
    phase = master["status"].get("phase")
    word = {"Running": "Running", "Succeeded": "Succeeded", "Failed": "Failed"}.get(phase or "", "Created")
    if word not in [one["type"] for one in (job.get("status") or {}).get("conditions", [])]:
        path = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/{name}/status"
        kube.call("PATCH", path, {"status": {"conditions": [{"type": word, "status": "True"}]}}, kind=_MERGE)


def _make_pod(kube: Kube, job: dict[str, Any], role: str, index: int, env: list[Any], total: int) -> None:
    template = job["spec"]["pytorchReplicaSpecs"][role]["template"]
    metadata, spec = dict(template["metadata"]), json.loads(json.dumps(template["spec"]))
    rank = 0 if role == "Master" else index + 1
    counts = {"WORLD_SIZE": total, "RANK": rank, "MASTER_PORT": 23456}  # both count pods
    spec["containers"][0]["env"] += [*env, *({"name": key, "value": str(value)} for key, value in counts.items())]
    spec["restartPolicy"] = "Never"
    owner = {
        "apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"], "controller": True,
    }  # fmt: skip
    labels = {"training.kubeflow.org/replica-type": role.lower(), "training.kubeflow.org/replica-index": str(index)}
    metadata |= {"name": f"{job['metadata']['name']}-{role.lower()}-{index}", "ownerReferences": [owner]}
    metadata["labels"] = {**metadata["labels"], **labels}
    kube.call("POST", f"/api/v1/namespaces/{job['metadata']['namespace']}/pods", {"metadata": metadata, "spec": spec})


def _clean(folder: Path, number: int) -> None:
    """End the containers that are left on a node; the daemons end with the API server."""
    ctr = ["ctr", "-a", f"{folder}/ctd-{number}.sock", "-n", "k8s.io"]
    tasks = subprocess.run([*ctr, "tasks", "ls", "-q"], capture_output=True, text=True, check=False).stdout.split()
    for task in tasks:
        subprocess.run([*ctr, "tasks", "rm", "-f", task], capture_output=True, check=False)


def _unmount(folder: Path) -> None:
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((one for one in places if one.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)

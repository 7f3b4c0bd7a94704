"""Jobs in pods of a real cluster (API server, scheduler, two kubelets with containerd), through the control plane."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import own_image
import trainmaster
from deploy import charts
from kube_nodes import GPUS, Cluster, python_folders
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.storage import open_store
from trainmaster.store import attempts, events
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(600)]
STEPS = 12
CONFIG = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64}, "steps": STEPS,
    "epoch_steps": STEPS, "batch_sequences": 8, "eval_sequences": 0, "sequence_tokens": 32, "device": "cpu",
    "checkpoint": {"every_steps": 4, "mode": "sync", "lease_s": 2.0},
}  # fmt: skip


@contextlib.asynccontextmanager
async def _running(db: Database, home: Path) -> AsyncIterator[None]:
    stop = asyncio.Event()
    loop = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.2))
    try:
        yield
    finally:
        stop.set()
        await loop


def drive(db: Database, home: Path, job: JobRow, until: Callable[[JobRow], bool]) -> JobRow:
    """Reconcile until the job is as wanted; the last look at it."""

    async def go() -> JobRow:
        async with asyncio.timeout(400), _running(db, home):
            while True:
                now = find_job(db, job.id)
                assert now is not None
                if until(now):
                    return now
                assert not now.status.final, (now.status, now.reason, now.message)
                await asyncio.sleep(0.1)

    return asyncio.run(go())


def is_final(job: JobRow) -> bool:
    return job.status.final


def steps(db: Database, job: JobRow) -> list[int]:
    rows = events.list_events(db, job.id, phase="STEP", limit=10_000)
    return [int(row.data["step"]) for row in rows if row.event == "metrics"]


def _checkpoints(db: Database, job: JobRow, event: str) -> list[int]:
    rows = events.list_events(db, job.id, phase="CHECKPOINT", limit=1000)
    return [int(row.data["step"]) for row in rows if row.event == event]


@pytest.fixture(scope="module")
def renderer() -> None:
    """What renders the chart; asked for before the image, which takes half a minute to build."""
    if charts.find_helm() is None:
        charts.build_renderer()


@pytest.fixture(scope="module")
def image(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our image, on every node; its name."""
    folder = tmp_path_factory.mktemp("image")
    with own_image.built(folder) as made:
        assert made.run("--version") == f"trainmaster {trainmaster.__version__}\n"
        assert made.run("-c", 'id -u; echo "$PWD"', options=("--entrypoint", "sh")) == "1000\n/home/trainmaster\n"
        nodes.import_images(made.save(folder / "own.tar"))
    return own_image.NAME


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_our_image_trains_on_two_nodes_and_each_event_arrives_once(
    db: Database, tmp_path: Path, nodes: Cluster, image: str, target: Callable[..., str]
) -> None:
    where = target(kind="pytorchjob", image=image, package="image", python=own_image.PYTHON, env={})
    spec = {"name": "pair", "target": where, "train": CONFIG, "resources": {"nodes": 2}}
    job = submitting.submit(db, parse_spec({**spec, "preflight": {"level": 0}}))
    # The control plane ends while the job runs, and a new one goes on.
    drive(db, tmp_path, job, lambda now: bool(steps(db, now)))
    ended = drive(db, tmp_path, job, is_final)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert steps(db, job) == list(range(1, STEPS + 1)), "each step once, in order"
    storage = open_store(tmp_path / "storage")
    for node, role in enumerate(("master-0", "worker-0")):
        stream = node_file(EVENTS_FILE, node)
        rows = events.list_events(db, job.id, limit=10_000, stream=stream)
        kept = storage.get(f"jobs/{job.id}/attempts/1/{stream}")
        assert [row.offset for row in rows] == [at.start() for at in re.finditer(rb"(?m)^", kept[:-1])]
        assert [(row.phase, row.event) for row in (rows[0], rows[-1])] == [("PROJECT", "start"), ("PROJECT", "end")]
        assert str(rows[0].data["host"]).endswith(f"-1-{role}"), "an agent in each of two pods"
    left = nodes.kube.call("GET", "/api/v1/pods?labelSelector=trainmaster/attempt")["items"]
    assert left == []


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.usefixtures("renderer")
def test_the_chart_brings_up_a_server_that_answers(tmp_path: Path, nodes: Cluster, image: str) -> None:
    """As `helm install` does it, or without Helm: not root, read-only root, the token from its secret."""
    folders = python_folders()
    home = nodes.kube.folder / "server-data"
    home.mkdir()
    home.chmod(0o777)  # hostPath: a kubelet changes no owner there
    volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(home)},
              "storageClassName": "here"}  # fmt: skip
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "volumeName": "server",
             "storageClassName": "here"}  # fmt: skip
    call, space = nodes.kube.call, "/api/v1/namespaces/default"
    meta = {"apiVersion": "v1", "metadata": {"name": "server"}}
    call("POST", "/api/v1/persistentvolumes", {**meta, "kind": "PersistentVolume", "spec": volume})
    call("POST", f"{space}/persistentvolumeclaims", {**meta, "kind": "PersistentVolumeClaim", "spec": claim})
    name, _, tag = image.rpartition(":")
    values = {
        "image": {"repository": name, "tag": tag, "pullPolicy": "Never"}, "volume": {"existingClaim": "server"},
        "volumes": [{"name": f"python-{n}", "hostPath": {"path": one}} for n, one in enumerate(folders)],
        "volumeMounts": [{"name": f"python-{n}", "mountPath": one, "readOnly": True} for n, one in enumerate(folders)],
        "resources": {"requests": {"memory": "64Mi"}},
    }  # fmt: skip
    pod = install(nodes, values, tmp_path)
    token = base64.b64decode(call("GET", f"{space}/secrets/demo-trainmaster-admin")["data"]["token"]).decode()

    def ask(path: str, *headers: str) -> str:
        """From the network of the nodes, as another pod would."""
        asked = ["curl", "--silent", "--max-time", "20", "--write-out", "%{http_code}", *headers]
        words = [*nodes.inside(), *asked, f"http://{pod['status']['podIP']}:8470{path}"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert ask("/readyz").endswith("200") and ask("/v1/training/jobs").endswith("401")
    assert '"jobs":[]' in ask("/v1/training/jobs", "--header", f"Authorization: Bearer {token}").replace(" ", "")
    assert (home / "home" / "trainmaster.db").stat().st_uid == 1000


def install(nodes: Cluster, values: dict[str, Any], home: Path) -> Any:
    """Install the chart by Helm, or create each of its parts; its only pod, once that is ready."""
    helm, call = charts.find_helm(), nodes.kube.call
    if helm is not None:
        (home / "values.yaml").write_text(yaml.safe_dump(values))
        words = [helm, "install", "demo", str(charts.CHART), "--values", str(home / "values.yaml"), "--wait"]
        env = {**os.environ, "KUBECONFIG": str(nodes.kube.kubeconfig()), "HOME": str(home)}
        done = subprocess.run([*nodes.inside(), *words, "--timeout=300s"], env=env, check=False)
        assert done.returncode == 0, call("GET", "/api/v1/namespaces/default/pods")["items"]
    else:
        for part in charts.render(values, namespace="default", home=home):
            place = "/api/v1" if part["apiVersion"] == "v1" else f"/apis/{part['apiVersion']}"
            call("POST", f"{place}/namespaces/default/{part['kind'].lower()}s", part)
    listed: list[Any] = []
    for _ in range(300):
        listed = call("GET", "/api/v1/namespaces/default/pods?labelSelector=app.kubernetes.io/instance%3Ddemo")["items"]
        if any(state["type"] == "Ready" and state["status"] == "True"
               for pod in listed for state in pod["status"].get("conditions", ())):  # fmt: skip
            break
        time.sleep(1)
    else:
        pytest.fail(f"no pod of the chart is ready: {[pod['status'] for pod in listed]}")
    (pod,) = listed
    return pod


def test_a_job_that_no_node_has_room_for_is_explained(db: Database, tmp_path: Path, target: Callable[..., str]) -> None:
    spec = {"name": "big", "target": target(gpus=GPUS + 1), "command": ["true"], "preflight": {"level": 0}}
    job = submitting.submit(db, parse_spec(spec))
    words = "none of 2 nodes fits: 2 have too little free nvidia.com/gpu"
    waits = drive(db, tmp_path, job, lambda now: now.message == words)
    assert waits.stage is Stage.CHECKING
    submitting.cancel(db, job.id)
    assert drive(db, tmp_path, job, is_final).status is Status.CANCELLED


def shell(on: str, job: JobRow, *words: str) -> list[str]:
    return [sys.executable, "-m", "trainmaster", "cluster", "shell", "--on", on, "--job", job.id, *words]


def call(words: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


def shell_pods(nodes: Cluster) -> list[Any]:
    path = "/api/v1/namespaces/default/pods?labelSelector=trainmaster/cluster-shell"
    return list(nodes.kube.call("GET", path)["items"])


def type_into(words: list[str], *steps: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """Run a command on a terminal of its own: wait for a text, type keys; its exit code and what it showed."""
    pid, screen = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    shown, seen, left = b"", 0, list(steps)
    with contextlib.suppress(OSError):  # Linux: the other side of a terminal has ended
        while select.select([screen], [], [], 60)[0] and (data := os.read(screen, 4096)):
            shown += data
            if left and (at := shown.find(left[0][0], seen)) >= 0:
                seen = at + len(left[0][0])
                os.write(screen, left.pop(0)[1])
    os.close(screen)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_shells_in_pods(db: Database, tmp_path: Path, nodes: Cluster, target: Callable[..., str]) -> None:
    on = target(kind="pytorchjob")
    spec = {"name": "pair", "target": on, "command": ["sleep", "600"], "resources": {"nodes": 2}}
    job = submitting.submit(db, parse_spec({**spec, "preflight": {"level": 0}}))
    drive(db, tmp_path, job, lambda now: now.stage is Stage.RUNNING)
    # By rank, by node, with the code, the output and the errors of the command.
    code, out, err = call(shell(on, job, "--rank", "1", "--", "sh", "-c", "hostname; echo wrong >&2; exit 7"))
    assert (code, out.rstrip().endswith("-worker-0"), "wrong" in err, "wrong" in out) == (7, True, True, False), err
    node = call(shell(on, job, "--node", "0", "--", "printenv", "TRAINMASTER_NODE"))[1].strip()
    assert node in nodes.kubelets
    assert call(shell(on, job, "--node", node, "--", "hostname"))[1].rstrip().endswith("-master-0")
    assert len(call(shell(on, job, "--", "head", "-c", "3000000", "/dev/zero"))[1]) == 3_000_000
    # On a terminal: a shell, keys as they are typed, Ctrl-C for the program in the pod.
    # A program that has answered: dash loses one Ctrl-C of a hundred that come while it starts a program.
    steps = ((b"$ ", b"cat\n"), (b"cat\r\n", b"here\n"), (b"here\r\nhere", b"\x03"), (b"$ ", b"exit 3\n"))
    code, shown = type_into(shell(on, job, "--", "sh"), *steps)
    assert code == 3, shown
    # A pod of its own, like the others.
    words = ("--new", "--", "sh", "-c", "id -u; ls /trainmaster/plan; printenv TRAINMASTER_POD")
    code, out, _ = call(shell(on, job, *words))
    assert (code, out.split()[0], "plan.json" in out, "tm-shell-" in out) == (0, "1000", True, True), out
    assert shell_pods(nodes) == []
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
        child = subprocess.Popen(shell(on, job, "--new", "--", "sleep", "500"), stdin=subprocess.DEVNULL)
        wait_until(lambda: any(one["status"].get("phase") == "Running" for one in shell_pods(nodes)))
        time.sleep(1)
        child.send_signal(number)
        assert child.wait(60) == (-9 if number is signal.SIGKILL else 128 + number)
        assert len(shell_pods(nodes)) == (1 if number is signal.SIGKILL else 0)
    code, _, err = call(shell(on, job, "--new", "--", "true"))
    assert (code, "removed what an earlier shell left" in err, shell_pods(nodes)) == (0, True, []), err
    submitting.cancel(db, job.id)
    assert drive(db, tmp_path, job, is_final).status is Status.CANCELLED


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_run_on_a_node_that_is_lost_goes_on_on_another(
    db: Database, tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    config = {**CONFIG, "steps": 400, "epoch_steps": 400}
    spec = {"name": "lost", "target": target(), "train": config, "preflight": {"level": 0}, "limits": {"attempts": 3}}
    job = submitting.submit(db, parse_spec(spec))
    drive(db, tmp_path, job, lambda now: bool(_checkpoints(db, now, "saved")))
    (pod,) = nodes.kube.call("GET", "/api/v1/pods?labelSelector=trainmaster/attempt")["items"]
    where = pod["spec"]["nodeName"]
    _lose(nodes, where)
    drive(db, tmp_path, job, lambda now: now.attempts == 2)
    first = attempts.list_attempts(db, job.id)[0]
    assert (first.reason, where in first.message) == (Reason.NODE_LOST, True), first
    drive(db, tmp_path, job, lambda now: bool(_checkpoints(db, now, "loaded")))
    before = len(steps(db, job))
    drive(db, tmp_path, job, lambda now: len(steps(db, now)) > before)
    submitting.cancel(db, job.id)
    assert drive(db, tmp_path, job, is_final).status is Status.CANCELLED
    assert _checkpoints(db, job, "loaded")[0] >= 4, "it went on from a checkpoint"


def _lose(nodes: Cluster, name: str) -> None:
    """Kill a node: its kubelet first, so that no word of the end gets out, then its containers."""
    kubelet = nodes.kubelets[name]
    kubelet.send_signal(signal.SIGKILL)
    kubelet.wait()
    number = list(nodes.kubelets).index(name)
    ctr = ["ctr", "-a", f"{nodes.kube.folder}/ctd-{number}.sock", "-n", "k8s.io"]
    tasks = subprocess.run([*ctr, "tasks", "ls", "-q"], capture_output=True, text=True, check=True).stdout.split()
    for task in tasks:
        subprocess.run([*ctr, "tasks", "kill", "-s", "SIGKILL", task], capture_output=True, check=False)
    time.sleep(0.1)

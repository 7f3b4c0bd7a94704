"""The images of the Dockerfile, built from a base made here without a network, and run; and the scripts beside them."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import containers
from containers import Registry

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "compat" / "gpu-acceptance" / "scripts"
# Stands in for every program that the build and the entry start: it notes its words and its folder.
STAND_IN = '#!/bin/sh\necho "$(basename "$0") $*" >>/calls\n[ "$(basename "$0")" = python3 ] && echo "RAN $*"\nexit 0\n'


def test_only_what_is_copied_reaches_the_build() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {word for line in copied for word in line.split()} == kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("podman")
    made = containers.local_podman(folder)
    try:
        made.podman("import", "-", "base:1", stdin=_base())
        made.podman("run", "--rm", "--network", "host", "base:1", "/bin/true")
    except AssertionError as wrong:
        pytest.skip(f"podman cannot run a container here: {str(wrong)[:300]}")
    yield made
    containers.end_podman(folder)


def _base() -> bytes:
    """A shell, the usual tools, and stand-ins for the programs of NVIDIA's image."""
    packed, busybox = io.BytesIO(), os.path.realpath(shutil.which("busybox") or "")
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(busybox, "bin/busybox")
        for name in ("sh", "echo", "true", "cat", "ls", "ln", "rm", "test", "basename", "nproc", "mkdir", "env", "id"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        programs = dict.fromkeys(("git", "make", "pip", "python3", "mpirun", "torchrun", "apt-get", "dcgmi"), STAND_IN)
        for name, text in (programs | {"bash": '#!/bin/sh\nexec sh "$@"\n'}).items():
            member = tarfile.TarInfo(f"usr/bin/{name}")
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


@pytest.mark.matrix(one_in=3, of="images that podman builds")
@pytest.mark.slow
def test_the_image_is_built_and_passes_its_arguments_on(podman: Registry) -> None:
    podman.podman(
        "build", "--layers=false", "--network", "host", "--build-arg", "BASE_IMAGE=localhost/base:1", "--tag",
        "gpu_cluster_testing:latest",
        str(ROOT),
    )  # fmt: skip

    def run(*words: str) -> str:
        return podman.podman("run", "--rm", "--network", "host", "gpu_cluster_testing:latest", *words)

    calls = run("cat", "/calls")
    assert (
        "git clone --depth 1 --branch v2.17.6 https://github.com/NVIDIA/nccl-tests.git /workspace/nccl-tests" in calls
    )
    assert "make -C /workspace/nccl-tests" in calls and "MPI=1" in calls
    assert "pip install --no-cache-dir /opt/trainmaster[images,server]" in calls
    assert run() == "RAN -m trainmaster.bench.accept --allow-unjudged\n"
    words = ("--model", "resnet18", "--batch-size", "128", "--data-mode", "fashion_mnist")
    assert run(*words) == f"RAN -m trainmaster.bench.accept --allow-unjudged {' '.join(words)}\n"
    assert run("bash", "-c", "cd /workspace/src && ls") == "data_utils.py\nmodels\ntrain.py\n"
    assert run("ls", "/workspace/src/models", "/workspace/scripts", "-1").count(".py") == 3
    assert run("bash", "-c", "echo $0 $PWD", "x") == "x /workspace\n"


@pytest.mark.matrix(one_in=3, of="images that podman builds")
@pytest.mark.slow
def test_the_sagemaker_stage_is_built_with_what_the_job_needs(podman: Registry) -> None:
    podman.podman(
        "build", "--layers=false", "--network", "host", "--build-arg", "BASE_IMAGE=localhost/base:1", "--tag",
        "sagemaker-cluster-test:latest", "--target", "sagemaker", str(ROOT),
    )  # fmt: skip

    def run(*words: str) -> str:
        return podman.podman("run", "--rm", "--network", "host", "sagemaker-cluster-test:latest", *words)

    calls = run("cat", "/calls")
    assert "libfabric-bin libfabric-dev" in calls and "dcgmi --version" in calls
    assert "make -C /opt/nccl-tests" in calls and "pip install --no-cache-dir /opt/trainmaster[server,storage]" in calls
    assert "train.yaml" in run("ls", "/opt/trainmaster/examples/jobs"), "the wheel includes them"
    assert run("sh", "-c", "ls -l /usr/local/cuda/efa/test-").strip().endswith("-> /opt/nccl-tests")


@pytest.mark.proof
@pytest.mark.slow
def test_the_files_of_the_image_train(tmp_path: Path) -> None:
    """train.py as torchrun starts it, and the earlier names of models and data."""
    place = ROOT / "compat" / "gpu-acceptance" / "src"
    words = "--model transformer --layers 1 --width 8 --heads 1 --sequence 4 --num-classes 5 --backend gloo"
    code = (
        f"import sys; sys.path.insert(0, {str(place)!r}); import data_utils, models.resnet, models.transformer; "
        f"sys.argv = ['train.py', *{words.split()!r}, '--warmup-iterations', '0', '--active-iterations', '1']; "
        "import train; sys.exit(train.main())"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 3, ran.stderr  # INCOMPLETE: no baseline for a CPU
    assert (tmp_path / "results.json").exists()


def run_script(name: str, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    return subprocess.run([str(SCRIPTS / name), *words], env=env, capture_output=True, text=True, check=False)


def test_old_logs_are_deleted_and_others_kept(tmp_path: Path) -> None:
    for name, days in (("acceptance-1.out", 9), ("acceptance-2.out", 1), ("nccl_bandwidth_3.out", 9), ("mine.txt", 9)):
        (tmp_path / name).write_text("x")
        seconds = (tmp_path / name).stat().st_mtime - days * 86400
        os.utime(tmp_path / name, (seconds, seconds))
    done = run_script("cleanup-slurm-logs.sh", str(tmp_path), "7")
    assert done.returncode == 0, done.stderr
    assert {one.name for one in tmp_path.iterdir()} == {"acceptance-2.out", "mine.txt"}
    assert run_script("cleanup-slurm-logs.sh", str(tmp_path), "a week").returncode == 2
    assert run_script("cleanup-slurm-logs.sh", str(tmp_path / "none")).returncode == 2


KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >>{folder}/calls
case "$*" in
*"get pytorchjobs"*) printf 'old 2020-01-01T00:00:00Z\\nnew {now}\\nrunning \\n' ;;
*"get nodes"*) printf 'NODE GPUS ACCELERATOR TAINTS\\ncpu-1 <none> x x\\ngpu-1 {gpus} nvidia-gpu x\\n' ;;
*"get pods"*) printf 'nvidia-device-plugin-x Running\\n' ;;
esac
"""


def kubectl(folder: Path, *, gpus: str = "8") -> Path:
    now = subprocess.run(
        ["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (folder / "kubectl").write_text(KUBECTL.format(folder=folder, now=now, gpus=gpus))
    (folder / "kubectl").chmod(0o755)
    return folder


@pytest.mark.parametrize("tools", ["GNU", "busybox"])
def test_only_old_finished_tests_are_deleted(tmp_path: Path, tools: str) -> None:
    """Also with a `date`, `awk` and `sh` that have no option of GNU's."""
    if tools == "busybox":
        for name in ("date", "awk", "tr", "sh"):
            (tmp_path / name).symlink_to(os.path.realpath(shutil.which("busybox") or "/nowhere"))
    done = run_script("cleanup-k8s-tests.sh", "training", "24", path=kubectl(tmp_path))
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--namespace training --selector app=gpu-acceptance-test" in calls[0]
    assert calls[1:] == ["delete pytorchjob --namespace training old"]
    assert run_script("cleanup-k8s-tests.sh", "training", "soon", path=tmp_path).returncode == 2


def test_nodes_with_gpus_are_counted(tmp_path: Path) -> None:
    done = run_script("verify-k8s-gpu-cluster.sh", path=kubectl(tmp_path))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 nodes offer GPUs")
    assert run_script("verify-k8s-gpu-cluster.sh", path=kubectl(tmp_path, gpus="0")).returncode == 1


@pytest.mark.parametrize(
    ("script", "refused"), [("cleanup-k8s-tests.sh", "pytorchjobs"), ("verify-k8s-gpu-cluster.sh", "pods")]
)
def test_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path, script: str, refused: str) -> None:
    path = kubectl(tmp_path)
    text = (path / "kubectl").read_text()
    (path / "kubectl").write_text(text.replace('case "$*" in', f'case "$*" in *"get {refused}"*) exit 1 ;;', 1))
    done = run_script(script, path=path)
    assert done.returncode == 1
    assert "device plugin" not in done.stdout, "not read is not absent"

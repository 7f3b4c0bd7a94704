"""Every command of the predecessors, typed where compat/README.md says, starts what that page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from trainmaster.cli.main import build as build_cli
from trainmaster.cluster.hyperpod.framework import MAKE_TARGETS

ROOT = Path(__file__).parents[1]
COMPAT = ROOT / "compat"
PAGE = (COMPAT / "README.md").read_text()
# What the guides of the predecessors name, beside the make targets.
NAMES = (
    "tools/test_hyperpod_cluster.py", "tools/validate_test_setup.py", "tools/dataset/", "tools/k8s-shell/",
    "FSDP/kubernetes/fsdp-hpto.yaml", "container", "create-image.sh sagemaker-cluster-test latest", "notebook.ipynb",
    "docker build --platform linux/amd64 -t gpu_cluster_testing:latest .", "/workspace/src/train.py",
    "/workspace/scripts/entrypoint.sh", "/workspace/nccl-tests", "pytorchjob.yaml", "acceptance_test.sh",
    "examples/kubernetes-mixed-cluster.yaml", "examples/kubernetes-flexible-nebius-pattern.yaml",
    "examples/kubernetes-multi-gpu-nebius-optimized.yaml", "examples/kubernetes-pytorch-multi-node.yaml",
    "examples/kubernetes-with-auto-cleanup.yaml", "examples/slurm-nccl-test.sh", "examples/slurm-acceptance-test.sh",
    "scripts/verify-k8s-gpu-cluster.sh", "scripts/cleanup-k8s-tests.sh default 24",
    "scripts/cleanup-slurm-logs.sh ./results 7", "kubectl delete pytorchjob gpu-cluster-acceptance-test",
    "kubectl delete pytorchjob -l app=gpu-acceptance-test",
)  # fmt: skip
# Stands in for kubectl, docker, sbatch, jupyter: notes its words; fails where a file that they name is not there.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >>{folder}/calls
before=
for word in "$@"; do
  case "$before" in -f | sbatch | notebook) case "$word" in *.*) [ -f "$word" ] || exit 1 ;; esac ;; esac
  before=$word
done
case "$(basename "$0") $*" in
sbatch*) [ -f "$1" ] || exit 1 ;;
"docker build"*) [ -f "$before/Dockerfile" ] || exit 1 ;;
*"get nodes"*) printf 'NODE GPUS ACCELERATOR TAINTS\\ngpu-1 8 nvidia-gpu x\\n' ;;
esac
"""


class Row(NamedTuple):
    """One command: what users type, in which folder, and what runs."""

    typed: str
    place: Path
    now: str


def read_rows() -> list[Row]:
    cells = re.findall(r"^\| `(.+?)` \| ([\w/-]+) \| `(.+?)` \|$", PAGE, re.MULTILINE)
    return [Row(typed, ROOT if place == "root" else COMPAT / place, now) for typed, place, now in cells]


ROWS = read_rows()
MAKE = [row for row in ROWS if row.typed.startswith("make ")]
HYPERPOD = [row for row in ROWS if "test_hyperpod_cluster.py" in row.typed]
OTHERS = [row for row in ROWS if row not in MAKE and row not in HYPERPOD]


def test_the_page_has_every_name_that_the_predecessors_promise() -> None:
    typed = [row.typed for row in ROWS]
    assert {f"make {name}" for name in MAKE_TARGETS} <= set(typed)
    assert [name for name in NAMES if name not in PAGE] == []


@pytest.mark.spawns
@pytest.mark.parametrize("place", [ROOT, COMPAT / "fsdp-hyperpod"], ids=lambda place: place.name)
def test_make_targets_run_the_command_that_the_page_names(place: Path) -> None:
    """In the root, and in the folder that stands in for the old one."""
    tools = (f"BIN={Path(sys.executable).parent}", f"--assume-old={os.path.relpath(ROOT / '.venv/.run', place)}")
    for row in MAKE:
        ran = run(f"{row.typed} -n {shlex.join(tools)}", place, {})
        assert ran.returncode == 0, ran.stderr
        action = row.now.partition("--action ")[2]
        if action == "validate-framework":
            assert "tools/validate_test_setup.py" in ran.stdout
        else:
            assert f"--action {action}\n" in ran.stdout
            (path,) = re.findall(r"--manifest (\S+)", ran.stdout)
            assert (place / path).samefile(COMPAT / "fsdp-hyperpod/FSDP/kubernetes/fsdp-hpto.yaml")


@pytest.mark.spawns
@pytest.mark.parametrize("row", HYPERPOD, ids=lambda row: row.typed)
def test_the_hyperpod_script_takes_its_options_and_asks_the_cluster(row: Row, tmp_path: Path) -> None:
    ran = run(row.typed, row.place, {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")})
    assert ran.returncode == 2 and "kubeconfig" in ran.stderr, ran.stderr


@pytest.mark.spawns
@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.typed[:60])
def test_scripts_and_files_are_where_they_are_typed(row: Row, tmp_path: Path) -> None:
    for name in ("kubectl", "docker", "sbatch", "jupyter"):
        (tmp_path / name).write_text(STAND_IN.format(folder=shlex.quote(str(tmp_path))))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "calls").touch()
    command = row.typed.replace("./results", shlex.quote(str(tmp_path)))
    ran = run(command, row.place, {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DRY_RUN": "1"})
    assert ran.returncode == 0, ran.stderr
    program = row.typed.split()[0]
    if (tmp_path / program).exists():
        assert (tmp_path / "calls").read_text().startswith(f"{program} ")


@pytest.mark.parametrize("now", sorted({row.now for row in ROWS if row.now.startswith("trainmaster ")}))
def test_what_the_page_says_to_type_now_is_understood(now: str) -> None:
    command: Any = typer.main.get_command(build_cli())
    words = shlex.split(now)[1:]
    while hasattr(command, "get_command"):
        name, *words = words
        command = command.get_command(None, name)
        assert command is not None, now
    if "--help" not in words:
        command.make_context(command.name, words)  # parses, runs nothing


@pytest.mark.parametrize("now", sorted({row.now for row in ROWS if row.now.startswith(("compat/", "deploy/"))}))
def test_scripts_of_the_last_column_are_there(now: str) -> None:
    assert os.access(ROOT / now.split(maxsplit=1)[0], os.X_OK)


def run(command: str, place: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=place, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )

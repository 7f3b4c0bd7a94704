"""The pipeline script: its exit code is that of the check, and a healthy run becomes what the next is compared with."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from machines import H200, Machine
from trainmaster.cluster.hyperpod.framework import MAKE_TARGETS

CI = Path(__file__).parents[2] / "deploy" / "ci"
pytestmark = pytest.mark.spawns


def check(folder: Path, machine: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "trainmaster"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainmaster "$@"\n')
    program.chmod(0o755)
    argv = [str(CI / "check.sh"), str(folder / "history"), "--replay", str(machine), "--level", "1", "--strict"]
    env = {**os.environ, "TRAINMASTER": str(program), "TRAINMASTER_HOME": str(folder / "home")}
    return subprocess.run(argv, capture_output=True, text=True, env=env, check=False)


@pytest.mark.proof
def test_a_run_is_compared_with_the_last_healthy_one(tmp_path: Path) -> None:
    shutil.copytree(H200, tmp_path / "broken")
    broken = Machine(tmp_path / "broken")
    broken.gpus(1)
    broken.edit(0, {"ecc_errors/volatile/dram_uncorrectable": "7"})
    first = check(tmp_path, H200)
    assert first.returncode == 0, first.stdout + first.stderr
    run = Path(first.stdout.splitlines()[-1])
    assert (run / "junit.xml").is_file() and (tmp_path / "history" / "healthy").resolve() == run.resolve()
    second = check(tmp_path, tmp_path / "broken")
    assert second.returncode == 1, second.stdout + second.stderr
    assert "gpu_ecc" in second.stdout
    assert (tmp_path / "history" / "healthy").resolve() == run.resolve(), "a failed run is no comparison"


def test_the_workflow_runs_the_script() -> None:
    workflow = yaml.safe_load((CI / "github-actions.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["check"]["steps"]]
    assert any(step.startswith("./check.sh ") for step in steps)


def test_the_drill_of_a_pull_request_is_a_command_that_exists() -> None:
    """Its words are read by the verb itself, its artifacts are what a report is saved as."""
    from trainmaster.cli._views import drill_report
    from trainmaster.cli.main import build

    github = yaml.safe_load((CI / "drill.yml").read_text())["jobs"]["drill"]["steps"]
    gitlab = yaml.safe_load((CI / "drill.gitlab-ci.yml").read_text())["resume-drill"]
    lines = [next(step["run"] for step in github if "drill --" in step.get("run", "")), gitlab["script"][-1]]
    verb = typer.main.get_command(build()).get_command(None, "drill")  # type: ignore[attr-defined,arg-type]
    for line in lines:
        program, name, *words = shlex.split(
            line.replace("${{ github.run_number }}", "7").replace("$CI_PIPELINE_IID", "7")
        )
        assert (program, name) == ("trainmaster", "drill")
        read = verb.make_context("drill", words).params
        assert (read["seed"], str(read["out"])) == (7, "proof")
        assert [read["config"], *read["values"]][:2] == ["python3", "train.py"]
    kept = {"drill.html", "drill.md", "drill.json", "junit.xml"}
    assert {Path(path).name for path in gitlab["artifacts"]["paths"]} | {"junit.xml"} == kept
    assert all(name.partition(".")[0] in (drill_report.save.__doc__ or "") for name in kept)


def test_the_hyperpod_workflow_runs_its_make_targets() -> None:
    steps = yaml.safe_load((CI / "hyperpod.yml").read_text())["jobs"]["cluster"]["steps"]
    typed = [step["run"].removeprefix("make ") for step in steps if "run" in step]
    assert typed == ["validate-framework", "validate-setup", "test-quick", "test-cluster"]
    assert set(typed) <= set(MAKE_TARGETS)

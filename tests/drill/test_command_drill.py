"""The drill of a stranger's script on real processes: whole it passes, and each planted bug is named by its cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import ForkServer
from trainmaster.core.results import Overall, Verdict
from trainmaster.drill import folders

from . import matrix, recipes

pytestmark = pytest.mark.spawns

HEALTHY = ("one", "term", "saving", "truncated", "stop")
TRAINERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(bool(recipes.missing(name)), reason=f"not installed: {recipes.missing(name)}"),
    )
    for name in recipes.NEEDS
]


@pytest.mark.matrix(one_in=36, of="drills of the scripts of others")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", ["none", *recipes.CLAIMS])
def test_a_bug_of_the_resume_is_named_and_a_whole_script_passes(bug: str, tmp_path: Path) -> None:
    with recipes.warm_python("torchrun") as python:
        proof = recipes.drill(
            tmp_path,
            "torchrun",
            changes=recipes.PLANTS["torchrun"].get(bug, ()),
            strikes={"none": ("one", "term", "saving", "truncated", "stop"), "latest": ("one", "saving")}.get(
                bug, ("one",)
            ),
            ranks=2 if bug == "rank0" else 1,
            python=(python, "-m"),
        )
    assert matrix.judge(proof, bug) is None
    found = {result.check: result.findings[0] for result in proof.results}
    if bug == "none":
        assert "bit-equal" in found["losses"].reason
        assert "noticed, went on from step" in found["truncated"].reason
        return
    assert proof.overall is Overall.FAIL
    assert found[recipes.CLAIMS[bug][0]].action
    if found["losses"].verdict is Verdict.FAIL:
        assert found["losses"].action == f"it follows from: {recipes.CLAIMS[bug][0]}"


@pytest.mark.matrix(one_in=36, of="drills of the scripts of others")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_recipe_that_ships_passes(name: str, tmp_path: Path) -> None:
    with recipes.warm_python(name) as python:
        proof = recipes.drill(tmp_path, name, strikes=("one", "flipped", "power"), python=(python, "-m"))
    assert matrix.judge(proof, "none") is None
    assert proof.shape is not None and len(proof.shape.saves) >= 7, "its saves are heard"


@pytest.mark.matrix(one_in=36, of="drills of the scripts of others")
@pytest.mark.timeout(600)
def test_a_hostile_script_gets_its_verdict_and_leaves_nothing(tmp_path: Path) -> None:
    """It ignores SIGTERM, leaves daemons, prints 10,000 lines a second and losses that are not numbers."""
    proof = recipes.drill(tmp_path, "torchrun", changes=recipes.HOSTILE, strikes=("one", "term"))
    found = {result.check: result.findings[0] for result in proof.results}
    assert {name: one.reason for name, one in found.items() if one.verdict in (Verdict.FAIL, Verdict.ERROR)} == {}
    assert found["stop"].verdict is Verdict.WARN and "SIGTERM was ignored" in found["stop"].reason
    assert "bit-equal" in found["losses"].reason
    mark = str(tmp_path).encode()
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if mark in read_or_nothing(path)]
    assert left == []


def read_or_nothing(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--", "no-such-program", "train.py"), "no such program"),
        (("job.yaml", "--kills", "3"), "a command takes --strike"),
        (("train.yaml", "--strike", "one"), "--strike belongs to the drill of a command"),
        (("job.yaml", "--strike", "lightning"), "twice, term, saving, power, full"),
        (("--command", "train.yaml"), "train.yaml:1: name: missing"),
        (("job.yaml", "resources.nodes=2"), "a drill runs on this machine"),
        ((), "drill -- python train.py"),
        (("torchrun", "--nproc-per-node", "2", "train.py"), "put -- before the command: trainmaster drill -- torchrun"),
        (("python3", "-m", "train"), "-m is no option of drill"),
        (("train.yaml", "--kils", "3"), "did you mean --kills?"),
        (("job.yaml", "--link", "data"), "no such entry"),
    ],
)
def test_wrong_usage_starts_nothing(programs: ForkServer, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\ncommand: [python3, train.py]\n")
    (tmp_path / "train.yaml").write_text("device: cpu\nsteps: 20\n")
    done = programs.run("trainmaster", "drill", *words, env={**os.environ, "COLUMNS": "400"}, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert says in " ".join(done.stderr.split())


def test_the_users_own_sitecustomize_runs_and_ours_leaves_the_path(tmp_path: Path) -> None:
    inject = Path(folders.__file__).with_name("inject")
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = True\n")
    env = {
        "PYTHONPATH": f"{inject}:{tmp_path}",
        "TRAINMASTER_DRILL_WITNESS": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = f"import sys, sitecustomize; print(mine, {str(inject)!r} in sys.path, sitecustomize.__file__)"
    done = subprocess.run([sys.executable, "-c", words], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", str(tmp_path / "sitecustomize.py")]
    assert done.stderr == ""
    (tmp_path / "sitecustomize.py").unlink()
    done = subprocess.run([sys.executable, "-c", "print(1)"], env=env, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")

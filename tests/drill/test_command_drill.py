"""The drill of a stranger's script on real processes: whole it passes, and each planted bug is named by its cause."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import ForkServer
from trainmaster.core.results import Overall, Verdict
from trainmaster.core.spec import JobSpec, Limits, Resources
from trainmaster.drill import folders
from trainmaster.drill.run import CommandDrill, Proof, Setup

pytestmark = pytest.mark.spawns

STRANGER = Path(__file__).with_name("stranger.py")
# What fails first, and words of its finding. Losses fail with it, and say from what it follows.
BUGS: dict[str, tuple[int, tuple[str, ...], str, str]] = {
    "optimizer": (1, ("one",), "optimizer", "is empty"),
    "data": (1, ("one",), "data", "data began anew"),
    "schedule": (1, ("one",), "schedule", "the schedule began anew"),
    "random": (1, ("one",), "random", "the random state of torch"),
    "latest": (1, ("one", "saving"), "restart", "after SIGKILL during a save the program did not start again"),
    "step0": (1, ("one",), "start", "began at step 0, although step"),
    "rank0": (2, ("one",), "ranks", "rank 1 from step 0"),
    "accumulation": (1, ("one",), "accumulation", "micro-batches of 2"),
}


def drill(folder: Path, *, bug: str = "", ranks: int = 1, strikes: tuple[str, ...]) -> Proof:
    work = folder / "work"
    work.mkdir()
    shutil.copy(STRANGER, work / "train.py")
    spec = JobSpec(
        name="stranger",
        command=(sys.executable, "train.py"),
        resources=Resources(processes_per_node=ranks),
        env={"BUG": bug, "OMP_NUM_THREADS": "1"},
        limits=Limits(grace_s=10.0),
    )
    proof = CommandDrill(Setup(spec=spec, work=work, strikes=strikes), folder / "drill").run()
    assert [path.name for path in work.iterdir()] == ["train.py"], "nothing of the user's is touched"
    return proof


@pytest.mark.matrix(one_in=4)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", ["", *BUGS])
def test_a_bug_of_the_resume_is_named_and_a_whole_script_passes(bug: str, tmp_path: Path) -> None:
    healthy = (1, ("one", "term", "saving", "truncated", "stop"), "", "")
    ranks, strikes, claim, words = BUGS.get(bug, healthy)
    proof = drill(tmp_path, bug=bug, ranks=ranks, strikes=strikes)
    found = {result.check: result.findings[0] for result in proof.results}
    failed = [name for name, finding in found.items() if finding.verdict is Verdict.FAIL]
    assert set(failed) <= {claim, "losses"}, {name: found[name].reason for name in failed}
    if not bug:
        assert proof.overall is Overall.PASS, [(name, one.reason) for name, one in found.items()]
        assert "bit-equal" in found["losses"].reason
        assert "noticed, went on from step" in found["truncated"].reason
        return
    assert proof.overall is Overall.FAIL
    assert words in found[claim].reason
    assert found[claim].action
    if "losses" in failed:
        assert found["losses"].action == f"it follows from: {claim}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--", "no-such-program", "train.py"), "no such program"),
        (("job.yaml", "--kills", "3"), "a command takes --strike"),
        (("train.yaml", "--strike", "one"), "--strike belongs to the drill of a command"),
        (("job.yaml", "--strike", "lightning"), "SIGKILL during a save"),
        (("--command", "train.yaml"), "train.yaml:1: name: missing"),
        (("job.yaml", "resources.nodes=2"), "a drill runs on this machine"),
        ((), "drill -- python train.py"),
        (("job.yaml", "--link", "data"), "no such entry"),
    ],
)
def test_wrong_usage_starts_nothing(programs: ForkServer, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\ncommand: [python3, train.py]\n")
    (tmp_path / "train.yaml").write_text("device: cpu\nsteps: 20\n")
    done = programs.run("trainmaster", "drill", *words, env=os.environ, cwd=tmp_path)
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

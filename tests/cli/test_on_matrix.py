"""Every verb with `--on` and every target: either a test shows that it works, or one line says what to use instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster import targets
from trainmaster.cli.main import build
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, fail

TESTS = Path(__file__).parents[1]
TARGETS = ("local", "ssh", "slurm", "kubernetes", "sagemaker", "hyperpod")
# The test that shows it, as FILE::TEST; or, after "!", words of the error.
MATRIX: dict[str, dict[str, str]] = {
    "check": {
        "local": "cli/test_on_matrix.py::test_local_is_this_machine",
        "ssh": "e2e/test_check_ssh.py::test_8_hosts_one_unreachable_and_one_hanging",
        "slurm": "e2e/test_slurm_check.py::test_a_node_is_drained_by_a_check_retested_and_given_back",
        "kubernetes": "e2e/test_accept_kubernetes.py::test_every_node_is_checked_and_measured_in_a_pod_of_its_own",
        "sagemaker": "targets/sagemaker/test_check_on_sagemaker.py::test_two_hosts_are_checked_measured_and_judged",
        "hyperpod": "! `trainmaster cluster validate`",
    },
    "accept": {
        "local": "cli/test_on_matrix.py::test_local_is_this_machine",
        "ssh": "e2e/test_accept_ssh.py::test_two_hosts_train_together",
        "slurm": "e2e/test_accept_slurm.py::test_a_cluster_is_accepted_through_srun",
        "kubernetes": "e2e/test_accept_kubernetes.py::test_a_cluster_is_accepted_by_training_in_a_pod_of_every_node",
        "sagemaker": "targets/sagemaker/test_accept_on_sagemaker.py::test_two_hosts_train_together",
        "hyperpod": "! `trainmaster cluster test`",
    },
    "bandwidth": {
        "local": "cli/test_on_matrix.py::test_local_is_this_machine",
        "ssh": "e2e/test_collective_ssh.py::test_bandwidth_over_ssh_names_the_silent",
        "slurm": "e2e/test_collective_slurm.py::test_bandwidth_between_nodes_is_measured_and_a_drained_node_is_named",
        "kubernetes": "e2e/test_accept_kubernetes.py::test_every_node_is_checked_and_measured_in_a_pod_of_its_own",
        "sagemaker": "! submit a job there with `command: [python3, -m, trainmaster.bench.collectives]`",
        "hyperpod": "! submit a job there with `command: [python3, -m, trainmaster.bench.collectives]`",
    },
    "isolate": {
        "local": "! pairs need several nodes: use --on ssh:hosts.yaml, --on slurm or --on kubernetes",
        "ssh": "e2e/test_collective_ssh.py::test_isolate_over_ssh_is_honest_about_too_few_rounds_and_names_the_silent",
        "slurm": "e2e/test_collective_slurm.py::test_isolate_pairs_the_nodes_that_answer",
        "kubernetes": "e2e/test_accept_kubernetes.py::test_every_node_is_checked_and_measured_in_a_pod_of_its_own",
        "sagemaker": "! its nodes cannot be chosen",
        "hyperpod": "! --on ssh:hosts.yaml",
    },
    "remedy": {
        "local": "! use `trainmaster nodes drain NODE --reason TEXT`",
        "ssh": "! name the one that runs on these hosts, or use `trainmaster nodes drain NODE --reason TEXT`",
        "slurm": "e2e/test_slurm_check.py::test_a_node_is_drained_by_a_check_retested_and_given_back",
        "kubernetes": "cli/test_remedy.py::test_kubernetes_speaks_kubectl",
        "sagemaker": "! its machines are SageMaker's",
        "hyperpod": "! use --on kubernetes",
    },
}
CELLS = [(verb, target, cell) for verb, row in MATRIX.items() for target, cell in row.items()]


def test_the_matrix_has_every_cell_and_no_target_that_is_gone() -> None:
    assert all(tuple(row) == TARGETS for row in MATRIX.values())
    assert set(TARGETS) <= set(targets.names())


@pytest.mark.parametrize(("verb", "target", "cell"), [one for one in CELLS if not one[2].startswith("!")])
def test_what_works_has_a_test(verb: str, target: str, cell: str) -> None:
    file, _, name = cell.partition("::")
    text = (TESTS / file).read_text()
    assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{verb} --on {target}"
    assert f'"{verb}"' in text or verb in text, f"{cell} does not use {verb}"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    failed = CheckResult(check="gpu_ecc", findings=(fail("one", action="replace it"),), took_s=0.0)
    node = NodeHealth(node="n1", level=1, planned=("gpu_ecc",), results=(failed,))
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "health.json").write_text(ClusterHealth(asked=("n1",), nodes=(node,)).to_json())
    return folder


def refuse(verb: str, on: str, bundle: Path) -> str:
    """The one line that the verb ends with."""
    words = [verb, *([str(bundle)] if verb == "remedy" else []), "--on", on]
    ran = CliRunner().invoke(build(guarded=True), words, env={"COLUMNS": "400"})
    assert ran.exit_code == 2, ran.output
    lines = ran.output.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in ran.output, ran.output
    return lines[0]


@pytest.mark.parametrize(("verb", "target", "cell"), [one for one in CELLS if one[2].startswith("!")])
def test_what_does_not_is_one_line_that_says_what_to_use(verb: str, target: str, cell: str, bundle: Path) -> None:
    options = [""] if target == "local" else ["", ":some.yaml"]
    for one in options:
        line = refuse(verb, target + one, bundle)
        assert f"--on {target}{one}: " in line and cell.removeprefix("! ") in line


@pytest.mark.parametrize("verb", MATRIX)
@pytest.mark.parametrize(
    "word", ["pbs", "ssh", "", "slurm:/does/not/exist.yaml", "ssh:/does/not/exist.yaml", "a\x1b[2Jb"]
)
def test_a_word_that_is_no_target_is_one_line_too(verb: str, word: str, bundle: Path) -> None:
    assert "\x1b" not in refuse(verb, word, bundle)


@pytest.mark.matrix(one_in=3)
@pytest.mark.spawns
@pytest.mark.parametrize(
    "words",
    [
        "check --only shm --home {home}",
        "bandwidth --collective all_reduce --max 8K --backend gloo --processes 1",
        "accept --model transformer --layers 1 --width 8 --heads 1 --sequence 4 --warmup-iterations 1 "
        "--active-iterations 1 --processes 1 --out {home}/results.json --home {home}",
    ],
)
def test_local_is_this_machine(words: str, tmp_path: Path) -> None:
    words = words.format(home=tmp_path / "home")
    ran = CliRunner().invoke(build(guarded=True), [*words.split(), "--on", "local", "--json"])
    assert ran.exit_code in (0, 1, 3) and '"overall"' in ran.stdout, ran.output

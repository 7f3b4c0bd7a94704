"""`trainmaster accept --on sagemaker:FILE` against moto's server: hosts are real processes that train over gloo."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from typer.testing import CliRunner

from sagemaker_server import Relay, interrupt_on_create, run_container, write_log
from trainmaster.cli.main import build

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[3]
MODEL = botocore.session.get_session().get_service_model("sagemaker")
SMALL = (
    "--backend", "gloo", "--processes", "1", "--model", "resnet18", "--image-size", "32", "--batch-size", "4",
    "--num-classes", "10", "--warmup-iterations", "1", "--active-iterations", "3", "--min-throughput", "0.01",
    "--compile", "off", "--timeout", "120",
)  # fmt: skip


@pytest.fixture
def file(relay: Relay, account: Path) -> Path:
    changes = {"instance_type": "ml.m5.large", "price_per_hour": 3.6, "poll_s": 0.3, "python": sys.executable}
    account.write_text(yaml.safe_dump({**yaml.safe_load(account.read_text()), **changes}))
    return account


def call(file: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the verb."""
    out = file.parent / "results.json"
    argv = ["accept", "--on", f"sagemaker:{file}", "--out", str(out), "--home", str(file.parent / "home"), *words]
    ran = CliRunner().invoke(build(guarded=True), argv, env={"COLUMNS": "400"})
    return ran.exit_code, ran.stdout, ran.stderr


def begin(relay: Relay, work: Callable[[str], None]) -> list[threading.Thread]:
    """`work` for the job that is created, beside the verb."""
    running: list[threading.Thread] = []

    def create(name: str) -> None:
        relay.set(name, "InProgress", "Training")
        running.append(threading.Thread(target=work, args=(name,)))
        running[-1].start()

    relay.on_create = create
    return running


def train(relay: Relay, client: Any, endpoint: str, folder: Path, name: str) -> None:
    """Both hosts of a job, then its end. Their names are ones that this machine can resolve."""
    hosts = ("127.0.0.1", "localhost")

    def one(here: int) -> list[str]:
        env = {"PYTHONPATH": str(ROOT / "src")}
        return run_container(
            client, endpoint, name, folder / f"host-{here}", hosts=hosts, here=here, env=env, fails=None
        )

    try:
        with ThreadPoolExecutor(2) as pool:
            for here, lines in enumerate(pool.map(one, range(2))):
                write_log(client, f"{name}/algo-{here + 1}-1", lines)
    finally:
        relay.end(name, "Completed", billable_s=600)


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_two_hosts_train_together(relay: Relay, client: Any, endpoint: str, file: Path, tmp_path: Path) -> None:
    running = begin(relay, lambda name: train(relay, client, endpoint, tmp_path, name))
    code, out, err = call(file, "--nodes", "2", *SMALL)
    for one in running:
        one.join()
    document = json.loads((tmp_path / "results.json").read_text())
    assert (code, document["world_size"], document["nodes"]) == (document["exit_code"], 2, 2), out + err
    fine = ("pass", "warn", "skip")
    rest = {one["check"] for one in document["checks"] for each in one["findings"] if each["verdict"] not in fine}
    assert rest <= {"accept_stragglers"}, document["checks"]  # both hosts share the cores of this machine
    assert "accept_throughput" in {one["check"] for one in document["checks"]}
    assert "600 billable seconds of 2 x ml.m5.large; 1.20 USD" in err.replace("\n", " ")
    assert relay.seen["CreateTrainingJob"] == 1


def test_a_job_that_fails_without_a_result_passes_nothing(
    relay: Relay, client: Any, file: Path, tmp_path: Path
) -> None:
    running = begin(relay, lambda name: relay.end(name, "Failed", reason="AlgorithmError: no image"))
    code, out, err = call(file, "--nodes", "2", *SMALL)
    for one in running:
        one.join()
    document = json.loads((tmp_path / "results.json").read_text())
    assert (code, document["overall"]) == (3, "INCOMPLETE"), out + err
    assert "no image" in " ".join(out.split()) and "CloudWatch" in out


def test_the_request_is_printed_and_valid_and_nothing_is_asked(relay: Relay, file: Path) -> None:
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "spot": True}))
    code, out, err = call(file, "--nodes", "4", "--dry-run", "plan", *SMALL)
    assert code == 0, err
    request = json.loads(out)
    found = ParamValidator().validate(request, MODEL.operation_model("CreateTrainingJob").input_shape)
    assert not found.has_errors(), found.generate_report()
    assert request["ResourceConfig"]["InstanceCount"] == 4 and not request["EnableManagedSpotTraining"]
    assert relay.seen == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--suite", "quick"), "--suite: each training job has other machines"),
        ((), "ml.m5.large is not in the table of instance types: state its GPUs with --processes"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_job_is_made(
    relay: Relay, file: Path, words: tuple[str, ...], told: str
) -> None:
    code, _, err = call(file, *words)
    assert code == 2 and told in " ".join(err.split())
    assert relay.seen == {}


def test_nodes_without_a_training_job_is_refused() -> None:
    ran = CliRunner().invoke(build(guarded=True), ["accept", "--nodes", "2"], env={"COLUMNS": "400", **os.environ})
    assert ran.exit_code == 2 and "--nodes is about a training job" in " ".join(ran.stderr.split())


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("when", ["while it is created", "while it runs", "while AWS refuses to stop it"])
def test_an_interrupt_stops_the_job_or_says_that_it_may_still_run(relay: Relay, file: Path, when: str) -> None:
    made = interrupt_on_create(relay, signal.SIGINT, during=when == "while it is created")
    relay.refuse = "StopTrainingJob" if when == "while AWS refuses to stop it" else ""
    code, out, err = call(file, *SMALL)
    assert code != 0 and not (file.parent / "results.json").exists(), out + err
    if relay.refuse:
        assert "may still run and cost money; stop it: aws sagemaker stop-training-job --region us-east-1" in err
    else:
        assert code == 130 and relay.job(made[0]).training_job_status == "Stopped", err

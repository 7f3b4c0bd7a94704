"""`trainmaster check --on sagemaker:FILE` against moto's server, and what must not pass there.

The server runs no containers; where a test needs them it runs start.py, the agent and trainmaster.sagemaker_job as real
processes, with a recorded GPU node in place of the machine. They write their results into the server's S3.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from typer.testing import CliRunner

from fork_server import ForkServer
from machines import H200
from sagemaker_server import BUCKET, Relay, interrupt_on_create, run_container, write_log
from trainmaster.checks import document
from trainmaster.cli.main import build
from trainmaster.cluster.sagemaker import check as sagemaker_check
from trainmaster.core.expect import Expect
from trainmaster.node.host import Host
from trainmaster.targets.sagemaker import inputs
from trainmaster.targets.sagemaker.aws import translate
from warm_python import WarmPython

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parents[3]
MODEL = botocore.session.get_session().get_service_model("sagemaker")
SITE = "".join(
    f'[{name}]\n"64K" = 0.000001\n'
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
)


@pytest.fixture(scope="module")
def python(programs: ForkServer) -> Iterator[str]:
    """For the containers: the job, its collectives and their ranks are forked from a warm process."""
    made = WarmPython(programs, deep=True)
    yield str(made.path)
    made.close()


@pytest.fixture
def file(relay: Relay, account: Path, python: str) -> Path:
    """Settings of a type that no table knows, so that nothing is expected of the recorded machine."""
    changes = {"instance_type": "ml.m5.large", "price_per_hour": 3.6, "poll_s": 0.3, "python": python}
    account.write_text(yaml.safe_dump({**yaml.safe_load(account.read_text()), **changes}))
    return account


def call(file: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the verb."""
    argv = ["check", "--on", f"sagemaker:{file}", "--home", str(file.parent / "home"), *words]
    ran = CliRunner().invoke(build(guarded=True), argv, env={"COLUMNS": "400"})
    return ran.exit_code, ran.stdout, ran.stderr


class Hosts:
    """Containers of the job that the relay creates: one thread each, then the end of the job."""

    def __init__(self, relay: Relay, client: Any, endpoint: str, folder: Path, count: int) -> None:
        self.relay, self.client, self.endpoint, self.folder = relay, client, endpoint, folder
        self.names = tuple(f"algo-{number + 1}" for number in range(count))
        self.running: list[threading.Thread] = []
        relay.on_create = self.create
        tools = folder / "tools"
        tools.mkdir()
        (tools / "nvidia-smi").write_text('#!/bin/sh\necho "GPU 0: NVIDIA H200 (UUID: GPU-0)"\n')
        (tools / "nvidia-smi").chmod(0o755)
        (folder / "site.toml").write_text(SITE)
        for number, name in enumerate(self.names):  # two machines never have the same GPU
            shutil.copytree(H200, folder / "captures" / name)
            for path in (folder / "captures" / name).rglob("*"):
                if path.is_file() and b"GPU-00000000" in (content := path.read_bytes()):
                    path.write_bytes(content.replace(b"GPU-00000000", f"GPU-0000000{number}".encode()))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])

    def create(self, name: str) -> None:
        self.relay.set(name, "InProgress", "Training")
        self.running.append(threading.Thread(target=self.run, args=(name,)))
        self.running[-1].start()

    def run(self, name: str, *, present: int | None = None, wait_s: str = "60") -> None:
        fails = present is not None

        def one(here: int) -> list[str]:
            host = self.names[here]

            def lay_out(given: Path) -> None:
                plan = json.loads((given / "plan.json").read_text())
                words = plan["spec"]["command"]
                words += ["--replay", str(self.folder / "captures" / host), "--work", str(self.folder / "work")]
                words += ["--max-size", "64K", "--baseline", str(self.folder / "site.toml"), "--wait", wait_s]
                plan["spec"]["command"] = words
                (given / "plan.json").write_text(json.dumps(plan))

            env = {
                "PATH": f"{self.folder / 'tools'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
                "AWS_REGION": "us-east-1", "SM_MASTER_ADDR": "127.0.0.1", "SM_MASTER_PORT": self.port,
            }  # fmt: skip
            return run_container(
                self.client, self.endpoint, name, self.folder / host, hosts=self.names, here=here, lay_out=lay_out,
                env=env, fails=fails and here == 0,
            )  # fmt: skip

        try:
            with ThreadPoolExecutor() as pool:
                for here, lines in enumerate(pool.map(one, range(len(self.names) if present is None else present))):
                    write_log(self.client, f"{name}/{self.names[here]}-1", lines)
        finally:
            reason = "AlgorithmError: ExecuteUserScriptError: exit code 3" if fails else None
            self.relay.end(name, "Failed" if fails else "Completed", reason=reason, billable_s=500)


def objects(client: Any) -> dict[str, bytes]:
    listed = client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", ())
    return {one["Key"]: client("s3").get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read() for one in listed}


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_two_hosts_are_checked_measured_and_judged(
    relay: Relay, client: Any, endpoint: str, file: Path, tmp_path: Path
) -> None:
    hosts = Hosts(relay, client, endpoint, tmp_path, 2)
    words = ["--nodes", "2", "--level", "2", "--only", "gpu_count,hostname,collectives"]
    code, out, said = call(file, *words, "--json", "--out", str(tmp_path / "bundle"))
    for thread in hosts.running:
        thread.join()
    health = json.loads(out)
    results = {result["check"]: result["findings"] for result in health["cluster"]}
    assert (code, health["overall"]) == (0, "PASS"), f"{out}\n{said}"
    assert [node["node"] for node in health["nodes"]] == ["algo-1", "algo-2"]
    for name in ("sagemaker_job", "efa_communication", "nccl_tests"):
        assert [finding["device"] for finding in results[name]] == ["algo-1", "algo-2"], name
    assert any(finding["values"].get("collective") == "all_reduce" for finding in results["collectives"])
    (ended,) = results["training_job"]
    assert (ended["values"]["billable_s"], ended["values"]["cost_usd"]) == (500, 1.0)
    assert [key for key in objects(client) if key.endswith("/check/health.json")], "the results stay"
    assert "500 billable seconds of 2 x ml.m5.large; 1.00 USD" in said and "Training" in said
    assert (tmp_path / "bundle" / "nodes" / "algo-2" / "answers.json").exists()
    assert not [key for key in objects(client) if "/input/" in key], "the inputs are removed"
    again = CliRunner().invoke(build(guarded=True), ["rejudge", str(tmp_path / "bundle"), "--json"])
    assert json.loads(again.stdout)["overall"] == "PASS", again.output


@pytest.mark.proof
def test_a_host_that_never_starts_is_named_and_nothing_passes(
    relay: Relay, client: Any, endpoint: str, file: Path, tmp_path: Path
) -> None:
    hosts = Hosts(relay, client, endpoint, tmp_path, 2)
    full = hosts.run
    hosts.run = lambda name, **_: full(name, present=1, wait_s="1")  # type: ignore[method-assign]
    code, out, said = call(file, "--nodes", "2", "--only", "gpu_count,hostname", "--json")
    for thread in hosts.running:
        thread.join()
    health = json.loads(out)
    assert (code, health["overall"]) == (3, "INCOMPLETE"), said
    assert [node["node"] for node in health["nodes"]] == ["algo-1"]
    (silent,) = health["silent"]
    assert silent["node"] == "algo-2" and "without an answer of this host" in silent["reason"]
    assert "/aws/sagemaker/TrainingJobs" in silent["action"]


# --- without containers: what a job leaves is written by the test ----------------------------------------------------


def answer(host: str, **changes: Any) -> bytes:
    """The answer of a host that ran `--only shm` at level 1."""
    health = document.document(document.measure(Host(), Expect(), level=1, only=["shm"], node=host))
    return json.dumps({**health, **changes}).encode()


def leave(client: Any, name: str, files: dict[str, bytes], *, job: str | None = None) -> None:
    """Objects of a job in the folder of its results."""
    attempt = (job or name).removeprefix("tm-").removesuffix("-1")
    uuid = "-".join((attempt[:8], attempt[8:12], attempt[12:16], attempt[16:20], attempt[20:]))
    for key, data in files.items():
        client("s3").put_object(Bucket=BUCKET, Key=f"tm/jobs/{uuid}/check/{key}", Body=data)


def first_host(hosts: list[str], **changes: Any) -> bytes:
    """health.json of a healthy run of `--only shm`."""
    jobs = [{"verdict": "pass", "reason": "rank 0 of 1", "device": host, "values": {"world_size": 1}} for host in hosts]
    nodes = [{k: v for k, v in json.loads(answer(host)).items() if k not in ("overall", "exit_code", "host")}
             for host in hosts]  # fmt: skip
    for node in nodes:
        node["results"] = [{k: v for k, v in one.items() if k != "verdict"} for one in node["results"]]
    cluster = [{"check": "sagemaker_job", "findings": jobs, "took_s": 0.0}]
    return json.dumps({"asked": hosts, "nodes": nodes, "cluster": cluster, **changes}).encode()


def judge_job(
    relay: Relay, file: Path, write: Callable[[str], None], status: str = "Completed", reason: str | None = None
) -> tuple[int, dict[str, Any], str]:
    def create(name: str) -> None:
        write(name)
        relay.end(name, status, reason=reason)

    relay.on_create = create
    code, out, said = call(file, "--only", "shm", "--json")
    return code, json.loads(out), said


def whole(client: Any, **changes: Any) -> Callable[[str], None]:
    """What a healthy job of one host leaves, with changes of its answer."""
    return lambda name: leave(
        client, name,
        {f"answers/{name}/algo-1.json": answer("algo-1", **changes), "health.json": first_host(["algo-1"])},
    )  # fmt: skip


def test_what_a_healthy_job_left_passes(relay: Relay, client: Any, file: Path) -> None:
    code, health, said = judge_job(relay, file, whole(client))
    assert (code, health["overall"]) == (0, "PASS"), f"{health}\n{said}"


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    ("status", "reason"),
    [("Failed", "AlgorithmError: exit code 1"), ("Failed", "CapacityError: none"), ("Stopped", None)],
)
def test_a_job_that_did_not_complete_does_not_pass_with_whole_results(
    relay: Relay, client: Any, file: Path, status: str, reason: str | None
) -> None:
    code, health, _ = judge_job(relay, file, whole(client), status, reason)
    assert (code, health["overall"]) == (3, "INCOMPLETE")
    (ended,) = next(one["findings"] for one in health["cluster"] if one["check"] == "training_job")
    assert ended["verdict"] == "error" and (reason or "stopped at SageMaker") in ended["reason"]


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("status", ["Failed", "Completed"])
def test_results_of_an_earlier_job_are_not_taken(relay: Relay, client: Any, file: Path, status: str) -> None:
    before = "tm-" + "0" * 32 + "-1"

    def write(name: str) -> None:
        old = {f"answers/{before}/algo-1.json": answer("algo-1"), "health.json": first_host(["algo-1"])}
        leave(client, before, old)
        leave(client, name, {f"answers/{before}/algo-1.json": answer("algo-1")})

    code, health, _ = judge_job(relay, file, write, status)
    assert (code, health["overall"], health["nodes"]) == (3, "INCOMPLETE", [])
    assert "without an answer" in health["silent"][0]["reason"]


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "no health.json"),
        ({"health.json": b"{"}, "cannot be parsed"),
        ({"health.json": b"\xff\x00"}, "cannot be parsed"),
        ({"health.json": first_host(["algo-1", "algo-2"])}, "other hosts"),
        ({"health.json": first_host(["algo-1"], cluster=[])}, "no result of sagemaker_job"),
    ],
)
def test_results_of_the_first_host_that_cannot_be_used_are_incomplete(
    relay: Relay, client: Any, file: Path, files: dict[str, bytes], word: str
) -> None:
    def write(name: str) -> None:
        leave(client, name, {f"answers/{name}/algo-1.json": answer("algo-1"), **files})

    code, health, _ = judge_job(relay, file, write)
    assert (code, health["overall"]) == (3, "INCOMPLETE")
    assert word in json.dumps(health["cluster"])


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": "0.0.1"}, "image has Trainmaster"),
        ({"level": 3}, "level 3"),
        ({"planned": []}, "planned 0 checks"),
        ({"results": 7}, "cannot be parsed"),
        ({"node": "algo-2"}, "that of algo-2"),
    ],
)
def test_an_answer_to_another_question_is_silence(
    relay: Relay, client: Any, file: Path, changes: dict[str, Any], word: str
) -> None:
    code, health, _ = judge_job(relay, file, whole(client, **changes))
    assert (code, health["overall"]) == (3, "INCOMPLETE")
    assert word in health["silent"][0]["reason"]


def test_results_are_asked_for_again_while_s3_is_throttling(
    relay: Relay, client: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host is not silent, and an hour of a job not lost, because of one answer 503."""
    monkeypatch.setattr(sagemaker_check, "_AGAIN_S", 0.01)
    read, refused = inputs.read_object, list[str]()

    async def throttled(aws: Any, bucket: str, key: str, *rest: Any, **more: Any) -> bytes:
        if "/check/" in key and refused.count(key) < 3:
            refused.append(key)
            wrong = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
            raise translate("get_object", wrong)
        return await read(aws, bucket, key, *rest, **more)

    monkeypatch.setattr(inputs, "read_object", throttled)
    code, health, said = judge_job(relay, file, whole(client))
    assert (code, health["overall"], len(refused)) == (0, "PASS", 6), f"{health}\n{said}"


def test_results_that_cannot_be_read_for_minutes_are_incomplete(
    relay: Relay, client: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sagemaker_check, "_AGAIN_S", 0.01)
    monkeypatch.setattr(sagemaker_check, "_READ_S", 0.1)

    async def throttled(*_: Any, **__: Any) -> bytes:
        raise translate("get_object", {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}})

    monkeypatch.setattr(inputs, "read_object", throttled)
    code, health, _ = judge_job(relay, file, whole(client))
    assert (code, health["overall"]) == (3, "INCOMPLETE") and "SlowDown" in health["silent"][0]["reason"]


def test_a_refused_request_is_one_line_and_leaves_nothing_running(
    client: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "storage": "s3://not-there/tm"}))
    code, out, said = call(file, "--only", "shm")
    assert (code, out) == (3, "") and "NoSuchBucket" in said and "may still run" not in said
    assert len(said.strip().splitlines()) == 1


# --- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["while it is created", "while it runs"])
def test_an_interrupted_check_stops_its_job(
    relay: Relay, client: Any, file: Path, number: signal.Signals, when: str
) -> None:
    made = interrupt_on_create(relay, number, during=when == "while it is created")
    code, out, said = call(file, "--only", "shm")
    assert (code, out) == (130, ""), said
    assert relay.seen["StopTrainingJob"] == 1 and relay.job(made[0]).training_job_status == "Stopped", said
    assert f"training job {made[0]}: Stopped" in said
    assert not [key for key in objects(client) if "/input/" in key], "the inputs are removed"


def test_a_job_that_cannot_be_stopped_is_named_with_the_command(
    relay: Relay, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.get_ident()
    monkeypatch.setattr(sagemaker_check, "_AGAIN_S", 0.01)

    def create(name: str) -> None:
        relay.set(name, "InProgress", "Training")
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()

    relay.on_create = create
    relay.refuse = "StopTrainingJob"
    code, _, said = call(file, "--only", "shm")
    assert code == 130 and "may still run and cost money" in said
    assert "aws sagemaker stop-training-job --region us-east-1 --training-job-name tm-" in said


def test_a_job_that_was_stopped_is_not_said_to_run_where_its_inputs_cannot_be_removed(
    relay: Relay, client: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sagemaker_check, "_AGAIN_S", 0.01)

    async def denied(*_: Any, **__: Any) -> list[tuple[str, int]]:
        raise translate("list_objects_v2", {"Error": {"Code": "AccessDenied"}})

    monkeypatch.setattr(inputs, "list_objects", denied)
    relay.on_create = lambda name: relay.set(name, "InProgress", "Training")
    code, out, said = call(file, "--only", "shm")
    assert (code, out, relay.seen["StopTrainingJob"]) == (3, "", 1), said
    assert "may still run" not in said and ": Stopped" in said
    assert "inputs of training job" in said and "AccessDenied" in said


# --- the request -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_dry_run_prints_a_request_that_botocore_accepts_and_no_secret(
    account: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    changes = {
        "instance_type": "ml.p5.48xlarge", "spot": True, "start": "agent", "subnets": ["subnet-0a"],
        "security_groups": ["sg-0a"], "check_image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/check:1",
        "endpoint": "http://127.0.0.1:9",
    }  # fmt: skip
    account.write_text(yaml.safe_dump({**yaml.safe_load(account.read_text()), **changes}))
    code, out, said = call(account, "--nodes", "4", "--level", str(level), "--expect", "driver=580", "--dry-run")
    assert code == 0 and "very-secret-value" not in out, said
    decoder, at = json.JSONDecoder(), out.index("{")
    request, _ = decoder.raw_decode(out, at)
    report = ParamValidator().validate(request, MODEL.operation_model("CreateTrainingJob").input_shape)
    assert not report.has_errors(), report.generate_report()
    assert request["ResourceConfig"]["InstanceCount"] == 4
    assert request["AlgorithmSpecification"]["TrainingImage"] == changes["check_image"]
    assert request["Environment"]["FI_PROVIDER"] == "efa" and "MY_TOKEN" not in request["Environment"]
    assert request["EnableManagedSpotTraining"] is False, "a restart would mix two sets of machines"
    plan, _ = decoder.raw_decode(out, out.index("{", out.index("plan.json")))
    words = plan["spec"]["command"]
    expect = json.loads(words[words.index("--expect-json") + 1])
    assert (expect["gpus"], expect["efa_devices"], expect["driver"]) == (8, 32, "580")
    assert tuple(words[1:3]) == sagemaker_check.PROGRAM and ("--alone" in words) == (level == 1)
    assert plan["spec"]["env"]["TRAINING_JOB_NAME"] == request["TrainingJobName"]
    code, out, _ = call(account, "--nodes", "4", "--level", str(level), "--expect", "driver=580", "--dry-run", "--json")
    assert code == 0 and json.loads(json.loads(out)["files"]["create-training-job.json"]) == request


def test_an_empty_settings_file_names_every_missing_field(tmp_path: Path) -> None:
    (tmp_path / "account.yaml").write_text("")
    code, _, said = call(tmp_path / "account.yaml", "--dry-run")
    assert code == 2 and all(f"{name}: missing" in said for name in ("region", "role", "storage", "instance_type"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--on", "slurm", "--dry-run"], "--on sagemaker:account.yaml"),
        (["--nodes", "2"], "--on sagemaker:account.yaml"),
        (["--on", "sagemaker"], "sagemaker:account.yaml"),
        (["--on", "sagemaker:/not/there.yaml"], "/not/there.yaml"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], text: str) -> None:
    ran = CliRunner().invoke(build(guarded=True), ["check", *words], env={"COLUMNS": "400"})
    assert ran.exit_code == 2 and text in ran.stderr and len(ran.stderr.strip().splitlines()) == 1, ran.output

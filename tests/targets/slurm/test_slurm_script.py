"""The batch script and the cluster file: what is printed is submitted; a wrong option is refused with its path."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster import targets
from trainmaster.core.errors import SpecError, TargetError, UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.core.vendors.slurm import SlurmOptions
from trainmaster.targets import Placement, slurm
from trainmaster.targets.slurm.script import Job, render_script
from trainmaster.targets.slurm.settings import SlurmSettings, parse_settings
from trainmaster.targets.slurm.target import Slurm

SPARE: dict[str, Any] = {
    "command": None, "train": {"steps": 8, "batch_sequences": 8, "device": "cpu"},
    "resources": {"nodes": 2, "spares": 1},
}  # fmt: skip
ATTEMPT = "0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10.1"


def script(settings: SlurmSettings | None = None, *, base: str = "/shared/jobs/j/attempts/1", **spec: Any) -> str:
    made = parse_spec({"name": "trial", "command": ["true"], **spec})
    chosen = settings or SlurmSettings(python="/venv/bin/python")
    job = Job(
        attempt=ATTEMPT, spec=made, options=made.slurm.over(chosen.defaults), settings=chosen,
        base=base, checkpoints="/shared/jobs/j/checkpoints", package="/shared/packages/d",
    )  # fmt: skip
    return render_script(job)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="needs Slurm's sbatch")
def test_sbatch_reads_a_folder_with_odd_characters_as_one_word(tmp_path: Path) -> None:
    """sbatch itself: it takes the options of a script apart before it asks for a controller."""
    odd = '/home/o\'hara/my "50%" #1 \\x é'
    (tmp_path / "batch.sh").write_text(script(base=odd))
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\nNodeName=localhost\n"
        "PartitionName=p Nodes=localhost\n"
    )
    done = subprocess.run(
        ["sbatch", "-vvv", "--test-only", "batch.sh"], check=False, cwd=tmp_path, stderr=subprocess.PIPE, timeout=60,
        env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
    ).stderr.decode()  # fmt: skip
    read = re.findall(r'Found in script, argument "(.*)"$', done, re.MULTILINE)
    assert f"--chdir={odd}" in read and f"--output={odd.replace('%', '%%')}/slurm-%j.log" in read, done
    assert "Invalid directive" not in done


def test_a_whole_script_is_valid_shell_and_has_every_option(tmp_path: Path) -> None:
    text = script(
        resources={"nodes": 2, "processes_per_node": 8},
        limits={"timeout_s": 7200, "grace_s": 120},
        slurm={
            "partition": "gpu", "account": "lab", "qos": "high", "constraint": "h100&ib", "reservation": "r1",
            "gpus_per_node": 8, "gpu_type": "h100", "cpus_per_node": 96, "memory_gib": 1000.5, "exclusive": True,
            "nodelist": ["n[1-2]"], "exclude": ["n7", "n9"], "requeue": True, "options": ["--switches=1"],
            "task_prolog": "/opt/prolog.sh",
        },
    )  # fmt: skip
    assert directives(text) == [
        f"--job-name=trial.{ATTEMPT}", f"--comment=trainmaster:{ATTEMPT}", "--chdir=/shared/jobs/j/attempts/1",
        "--output=/shared/jobs/j/attempts/1/slurm-%j.log", "--open-mode=append", "--nodes=2", "--ntasks=2",
        "--ntasks-per-node=1", "--partition=gpu", "--account=lab", "--qos=high", "--constraint=h100&ib",
        "--reservation=r1", "--gres=gpu:h100:8", "--cpus-per-task=96", "--mem=1024512M", "--exclusive",
        "--nodelist=n[1-2]", "--exclude=n7,n9", "--time=127", "--signal=B:USR1@210", "--requeue", "--switches=1",
    ]  # fmt: skip
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1" in text and "--task-prolog=/opt/prolog.sh" in text
    path = tmp_path / "batch.sh"
    path.write_text(text)
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(
    ("spec", "gres"),
    [
        ({}, None),
        ({"slurm": {"gpus_per_node": 4}}, "--gres=gpu:4"),
        ({"command": None, "train": {"steps": 1}, "resources": {"processes_per_node": 8}}, "--gres=gpu:8"),
        ({"command": None, "train": {"steps": 1, "device": "cpu"}}, None),
        ({"command": None, "train": {"steps": 1}, "slurm": {"gpus_per_node": 0}}, None),
    ],
)
def test_gpus_are_requested(spec: dict[str, Any], gres: str | None) -> None:
    spec = {key: value for key, value in {"command": ["true"], **spec}.items() if value is not None}
    made = [word for word in directives(script(**{"command": None, **spec})) if word.startswith("--gres")]
    assert made == ([gres] if gres else [])


def test_with_a_spare_the_job_has_a_node_more_and_survives_the_loss_of_one() -> None:
    text = script(**SPARE)
    assert {"--nodes=3", "--ntasks=3", "--no-kill"} <= set(directives(text))
    assert "srun --nodes=3 --ntasks=3" in text and "--kill-on-bad-exit=1 --no-kill" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "--no-kill" not in script(**SPARE | {"resources": {"nodes": 2}})


@pytest.mark.parametrize(
    ("step", "record", "code"),
    [
        ("exit 0", '{"ok": true}', 0),
        ("exit 1", '{"ok": true}', 0),  # srun fails because a node was lost
        ("sleep 600", '{"ok": true}', 0),  # srun waits for the lost node
        ("exit 0", '{"ok": false}', 75),
        ("exit 9", '{"ok": false}', 9),
        ("exit 9", None, 9),
    ],
)
def test_with_a_spare_the_end_of_node_0_is_that_of_the_job(
    tmp_path: Path, step: str, record: str | None, code: int
) -> None:
    base = tmp_path / "1"
    first = tmp_path / "1-node-0"
    first.mkdir()
    if record is not None:
        (first / "exit.json").write_text(record)
    text = script(**SPARE, limits={"grace_s": 2}).replace("/shared/jobs/j/attempts/1", str(base))
    body = "".join("exec_step &\n" if line.startswith("srun ") else line for line in text.splitlines(True))
    assert body != text
    ran = subprocess.run(["bash"], input=f"exec_step() {{ {step}; }}\n{body}", text=True, check=False, timeout=60)
    assert ran.returncode == code


def test_an_array_has_folders_and_logs_by_task() -> None:
    text = script(slurm={"array": "0-3%2"})
    assert "--array=0-3%2" in directives(text) and "--output=/shared/jobs/j/attempts/1/slurm-%A_%a.log" in directives(
        text
    )
    assert 'units="$base""-task-$SLURM_ARRAY_TASK_ID"' in text


def test_pyxis_and_apptainer_hold_the_node_program() -> None:
    image = {"image": "nvcr.io/team/train:1"}
    text = script(container=image, slurm={"container_runtime": "pyxis", "mounts": ["/data"], "gpus_per_node": 1})
    assert "'--container-image=nvcr.io#team/train:1'" in text or "--container-image=nvcr.io#team/train:1" in text
    assert "/shared/jobs/j:/shared/jobs/j" in text and "/data:/data" in text and "/shared/packages/d:" in text
    text = script(container=image, slurm={"container_runtime": "apptainer", "gpus_per_node": 1})
    assert "apptainer exec --nv --bind" in text and "docker://nvcr.io/team/train:1 python3 -m" in text
    assert "--nv" not in script(container=image, slurm={"container_runtime": "apptainer"})
    assert "container" not in script(container=image).partition("srun")[2]  # docker or podman, by the agent


def test_what_a_runtime_cannot_do_is_refused() -> None:
    runtime = {"container_runtime": "pyxis"}
    with pytest.raises(TargetError, match="state `command`"):
        script(command=None, container={"image": "a"}, slurm=runtime)
    login = {"user": "alice", "password_from": "PASSWORD"}
    with pytest.raises(TargetError, match=r"leave it out"):
        script(container={"image": "a", "login": login}, slurm=runtime)


CLUSTER = {
    "folder": "/shared",
    "defaults": {"qos": "usual"},
    "priorities": {"high": "--nice=-100", "urgent": "--qos=top"},
}


@pytest.mark.parametrize(
    ("queue", "words"),
    [
        ({}, {"--qos=usual", "--no-requeue"}),
        ({"name": "team-a"}, {"--qos=team-a", "--no-requeue"}),
        ({"preemptible": True}, {"--qos=usual", "--requeue"}),
        ({"priority": "low"}, {"--qos=usual", "--nice=10000", "--no-requeue"}),
        ({"priority": "high"}, {"--qos=usual", "--nice=-100", "--no-requeue"}),
        ({"priority": "urgent"}, {"--qos=top", "--no-requeue"}),
        ({"name": "top", "priority": "urgent"}, {"--qos=top", "--no-requeue"}),
    ],
)
def test_a_queue_is_options_of_sbatch(queue: dict[str, Any], words: set[str]) -> None:
    text = planned(queue=queue)
    kinds = ("--qos", "--nice", "--priority", "--requeue", "--no-requeue")
    assert {word for word in directives(text) if word.startswith(kinds)} == words
    assert ("scontrol requeue" in text) == ("--requeue" in words)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        ({"queue": {"priority": "soon"}}, "queue.priority", "write one of low, normal, high, urgent, or a QOS"),
        ({"queue": {"name": "a"}, "slurm": {"qos": "b"}}, "queue.name", "slurm.qos states b"),
        ({"queue": {"name": "a", "priority": "urgent"}}, "queue.priority", "the QOS top here, and the QOS a"),
        ({"queue": {"preemptible": True}, "slurm": {"requeue": False}}, "queue.preemptible", "slurm.requeue is false"),
        ({**SPARE, "slurm": {"array": "0-1"}}, "resources.spares", "leave out one of the two"),
    ],
)
def test_what_slurm_cannot_do_is_refused(spec: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        planned(**spec)
    (fault,) = refused.value.faults
    assert fault.path == path and words in fault.message


def planned(**spec: Any) -> str:
    """The script of a job on a cluster with priorities."""
    made = parse_spec({"name": "a", "command": ["true"], **spec})
    target = Slurm(parse_settings(CLUSTER, Path("/")))
    return list(target.plan(Placement(attempt=ATTEMPT, spec=made, job_folder=Path("/x/j"))).files.values())[-1]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"options": ["--export=ALL"]}, "slurm.options[0]"),
        ({"options": ["--wrap=reboot"]}, "slurm.options[0]"),
        ({"options": ["--nice=1\n#SBATCH --uid=0"]}, "slurm.options[0]"),
        ({"options": ["nice"]}, "slurm.options[0]"),
        ({"partition": "gpu\n#SBATCH -x"}, "slurm.partition"),
        ({"partition": "a b"}, "slurm.partition"),
        ({"exclude": ["n1 $(id)"]}, "slurm.exclude[0]"),
        ({"array": "0-"}, "slurm.array"),
        ({"mounts": ["data"]}, "slurm.mounts[0]"),
        ({"container_runtime": "lxc"}, "slurm.container_runtime"),
        ({"task_prolog": "/a b"}, "slurm.task_prolog"),
    ],
)
def test_a_wrong_option_is_refused_with_its_path(options: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"name": "a", "command": ["true"], "slurm": options})
    assert [fault.path for fault in refused.value.faults] == [path]


def test_defaults_of_the_cluster_file() -> None:
    settings = parse_settings(
        {"folder": "/shared", "defaults": {"partition": "gpu", "exclude": ["n7"], "requeue": True}}, Path("/")
    )
    options = SlurmOptions(partition="long", exclude=("n8",)).over(settings.defaults)
    assert (options.partition, options.exclude, options.requeue) == ("long", ("n7", "n8"), True)


def test_a_cluster_file_with_a_login_node() -> None:
    settings = parse_settings(
        {"login": {"host": "login-1", "user": "alice"}, "known_hosts": "keys", "setup": ["module load cuda"]},
        Path("/etc"),
    )
    assert settings.login is not None and (settings.login.host, settings.folder) == ("login-1", "~/.trainmaster")
    assert settings.known_hosts == Path("/etc/keys") and settings.python == "python3"
    submission = Slurm(settings).plan(
        Placement(attempt=ATTEMPT, spec=parse_spec({"name": "a", "command": ["true"]}), job_folder=Path("/x/j"))
    )
    assert submission.commands[0][:3] == ("ssh", "slurm", "sbatch")
    assert "module load cuda" in submission.render()


def test_a_python_below_a_folder_with_a_space_is_one_word() -> None:
    settings = parse_settings({"folder": "/shared", "python": "/shared/my venv/bin/python"}, Path("/"))
    submission = Slurm(settings).plan(
        Placement(attempt=ATTEMPT, spec=parse_spec({"name": "a", "command": ["true"]}), job_folder=Path("/x/j"))
    )
    (line,) = (line for line in submission.render().splitlines() if "node_start" in line)
    assert "/shared/my venv/bin/python" in shlex.split(line)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"folder": "relative"}, "folder"),
        ({"setup": ["a\nb"]}, "setup[0]"),
        ({"login": {"host": "a", "password": "x"}}, "hosts[0].password"),
        ({"defaults": {"partition": "a b"}}, "defaults.partition"),
        ({"unknown": 1}, "unknown"),
        ({"priorities": {"high": "--uid=0"}}, "priorities.high"),
        *(({"python": word}, "python") for word in ("a;b", "a$(b)", "`b`", "a'b", "a\nb", "a\tb", " a", "a ", "", " ")),
    ],
)
def test_a_wrong_cluster_file_is_refused(document: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_settings(document, Path("/"))
    assert path in [fault.path for fault in refused.value.faults]


def test_the_word_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.create("").settings.folder is None
    with pytest.raises(UsageError, match="TRAINMASTER_HOSTS"):
        monkeypatch.delenv("TRAINMASTER_HOSTS", raising=False)
        slurm.create("lab")
    (tmp_path / "lab.yaml").write_text("folder: /shared\n")
    monkeypatch.setenv("TRAINMASTER_HOSTS", str(tmp_path))
    assert slurm.create("lab").settings.folder == "/shared"
    with pytest.raises(UsageError, match="cannot be read"):
        slurm.create(str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UsageError, match="not YAML"):
        slurm.create(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("word", "names"), [("slurm", False), ("slurm:lab", False), ("slurm:/etc/lab.yaml", True), ("slurm:lab.yaml", True)]
)
def test_only_an_administrator_may_name_a_file_of_the_server(word: str, names: bool) -> None:
    assert targets.traits(word).names_file(word) is names


def test_the_environment_of_the_server_is_not_in_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "REGISTRY_PASSWORD")
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter2-hunter2")
    spec = parse_spec(
        {
            "name": "a",
            "command": ["true"],
            "container": {"image": "r.example.org/a:1", "login": {"user": "u", "password_from": "REGISTRY_PASSWORD"}},
        }
    )
    placement = Placement(attempt=ATTEMPT, spec=replace(spec), job_folder=Path("/x/j"))
    assert "hunter2" not in Slurm(SlurmSettings()).plan(placement).render()

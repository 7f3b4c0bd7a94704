"""A wrong word on the command line is answered with the right one."""

from __future__ import annotations

import json
import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pages import samples
from trainmaster import targets
from trainmaster.cli import _console
from trainmaster.cli.health import check
from trainmaster.cli.main import build, verbs
from trainmaster.cli.server import serve
from trainmaster.core.errors import MissingExtra, NoCapacity, SpecError, TargetError, Unreachable, UsageError
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.plan import Plan
from trainmaster.core.results import CheckResult, Finding, ok, skip
from trainmaster.core.schema import build as build_shape
from trainmaster.core.spec import Rent, parse_spec
from trainmaster.core.states import Reason
from trainmaster.documents import yaml_file
from trainmaster.store import attempts, costs, jobs
from trainmaster.store.migrate import open_database
from trainmaster.targets.kubernetes.settings import Settings
from trainmaster.targets.ssh.hosts import parse_hosts
from trainmaster.targets.ssh.slots import Offer, SlotTable, _no_capacity


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two jobs of one name; the newer one is of a token."""
    folder = tmp_path_factory.mktemp("home")
    db = open_database(folder / "trainmaster.db")
    with db.write() as conn:
        for number, by in enumerate((None, "ada")):
            at = datetime(2026, 11, 17, tzinfo=UTC) + timedelta(minutes=number)
            spec = parse_spec({"name": "twice", "command": ["true"]})
            jobs.insert_once(conn, f"{number}{JOB[1:]}", spec, key=None, by=by, at=at, word=spec.target)
    db.close()
    return folder


JOB = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11"


def invoke(*words: object) -> Result:
    environment = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner(env=environment).invoke(build(guarded=True), list(map(str, words)))


def run(*words: str) -> str:
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("word", "verb"),
    [
        ("status", "show"),
        ("describe", "show"),
        ("ps", "jobs"),
        ("list", "jobs"),
        ("run", "submit"),
        ("launch", "submit"),
        ("apply", "submit"),
        ("sbatch", "submit"),
        ("sweep", "submit"),
        ("stop", "cancel"),
        ("down", "cancel"),
        ("kill", "cancel"),
        ("scancel", "cancel"),
        ("squeue", "queue"),
        ("sinfo", "nodes"),
        ("drain", "nodes drain"),
        ("cordon", "nodes drain"),
        ("undrain", "nodes readmit"),
        ("budget", "cost"),
        ("quota", "queue"),
        ("users", "token list"),
        ("version", "--version"),
        ("help", "--help"),
        ("get", "jobs"),
        ("attach", "logs"),
        ("rm", "delete"),
        ("autopsy", "show"),
        ("metrics", "events"),
        ("submti", "submit"),
    ],
)
def test_a_word_of_another_program_names_our_verb(word: str, verb: str) -> None:
    assert f"No such command '{word}'. Did you mean '{verb}'?" in run(word)
    assert verb.split(maxsplit=1)[0] in verbs() or verb in ("--version", "--help")


@pytest.mark.parametrize("word", ["compare", "diff"])
def test_what_only_a_page_does_is_named_with_the_page(word: str) -> None:
    assert f"No such command '{word}'. Runs are compared on the page Compare of 'trainmaster serve'." in run(word)


def test_words_without_a_verb_say_what_there_is_instead() -> None:
    assert "The audit log is on the page Settings" in run("audit")
    assert "trainmaster token create" in run("login") and "TRAINMASTER_TOKEN_FILE" in run("whoami")


def test_the_name_of_a_known_target_is_no_place_to_check() -> None:
    text = run("check", "--on", "gpus")
    assert "'gpus' is no kind of target" in text and "known to the server, for jobs" in text
    assert "for check write what it stands for (`trainmaster target list`)" in text


def test_known_hosts_in_the_wrong_place_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        parse_hosts({"defaults": {"known_hosts": "kh"}, "hosts": ["a", {"host": "b", "known_hosts": "x"}]}, tmp_path)
    faults = {fault.path: fault.message for fault in refused.value.faults}
    assert set(faults) == {"defaults.known_hosts", "hosts[1].known_hosts"}
    assert all("at the top, beside `hosts:`" in message for message in faults.values())


def test_the_advice_of_a_lost_attempt_promises_no_other_attempt() -> None:
    action = Reason.NODE_LOST.rule.action
    assert "read the message" in action and "tried on another" not in action


def test_a_script_is_not_a_spec(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n")
    assert "train.py is a script, not a spec; start from: trainmaster examples command.yaml > job.yaml" in run(
        "submit", str(script)
    )


def test_the_beginning_of_check_names_lists_them() -> None:
    text = run("check", "--only", "gpu")
    assert "there is no check gpu; did you mean gpu_" in text
    assert "gpu_clocks" in text and "gpu_vbios" in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("submit", "job.yaml", "--priority", "high"), "FILE.yaml queue.priority=high"),
        (("submit", "job.yaml", "--after", "x"), "FILE.yaml 'after.jobs=[NAME]'"),
        (("queue", "-u", "me"), "jobs --by NAME"),
        (("jobs", "-a"), "are listed too"),
        (("jobs", "--user", "me"), "--by NAME"),
    ],
)
def test_an_option_of_another_program_is_answered_with_ours(words: tuple[str, ...], hint: str) -> None:
    text = run(*words)
    assert f"No such option: {words[2] if words[0] == 'submit' else words[1]}. " in text and hint in text
    assert "No such option: --bogus" in run("jobs", "--bogus")


def test_a_list_that_a_filter_leaves_empty_names_the_filter(home: Path) -> None:
    told = invoke("jobs", "--status", "running", "--project", "default", "--home", home).stderr
    assert "no job for --status running --project default; `trainmaster jobs` lists all" in told


def test_faults_of_a_check_create_nothing_anyway() -> None:
    text = run("check", "--expect", "foo=1")
    assert "1 fault" in text and "created" not in text


@pytest.mark.parametrize(
    ("finding", "said"), [(skip("no GPU", proof="PCI bus: 0 of 6 devices"), True), (ok("8 GPUs"), False)]
)
def test_a_pass_without_a_gpu_says_so(finding: Finding, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"cpu": ok("2 CPUs usable"), "gpu_count": finding}
    results = [CheckResult(check=name, findings=(found,), took_s=0.0) for name, found in rows.items()]
    node = NodeHealth(node="a", level=1, planned=tuple(rows), results=tuple(results))
    check._print_text(node, ClusterHealth(asked=("a",), nodes=(node,)), None, since="")
    text = capsys.readouterr().out
    assert ("no GPU was checked: none found and none expected (--expect gpus=8)" in text) == said


def test_who_submitted_a_job_and_where_it_runs_is_shown(home: Path) -> None:
    listed = invoke("jobs", "--home", home)
    assert "by" in listed.stdout.split() and "ada" in listed.stdout.split()
    rows = json.loads(invoke("jobs", "--json", "--home", home).stdout)["jobs"]
    assert [row["submitted_by"] for row in rows] == ["ada", None]
    shown = invoke("show", "twice", "--home", home)
    assert "2026-11-17" in shown.stdout and "by ada, project default" in shown.stdout
    assert ["target", "local"] in [line.split() for line in shown.stdout.splitlines()]
    assert json.loads(invoke("show", "twice", "--json", "--home", home).stdout)["submitted_by"] == "ada"
    assert "by local" in invoke("show", f"0{JOB[1:]}", "--home", home).stdout


def test_of_two_jobs_with_one_name_the_one_that_is_meant_is_named(home: Path) -> None:
    assert "2 jobs have the name twice: this is the newest, 1f1c1f0e" in invoke("show", "twice", "--home", home).stderr
    assert "newest" not in invoke("show", JOB.replace("6", "1", 1), "--home", home).stderr


def test_a_phase_that_there_is_not_names_those_there_are(home: Path) -> None:
    assert "no event of phase NOPE; this job has no events yet" in run(
        "events", "twice", "--phase", "NOPE", "--home", str(home)
    )
    known = invoke("events", "twice", "--phase", "CHECKPOINT", "--home", home)
    assert known.exit_code == 0 and "no event of phase CHECKPOINT" in known.stderr


def test_a_dry_run_leads_with_six_lines_and_has_json(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\ncommand: [python3, train.py]\nresources: { nodes: 1, processes_per_node: 8 }\n")
    words = ("submit", spec, "--dry-run", "--workdir", "none", "--home", tmp_path / "home")
    lines = invoke(*words).stdout.splitlines()
    assert [line[:12].strip() for line in lines[:6]] == [
        "where", "how many", "what runs", "price", "limits", "checkpoints",
    ]  # fmt: skip
    assert lines[1].endswith("1 machine, 8 processes on each") and lines[2].endswith("python3 train.py")
    plan = json.loads(invoke(*words, "--json").stdout)
    assert plan["summary"]["where"] == "local" and plan["commands"] and plan["files"]
    assert plan["summary"]["price"] == "none; resources.price_per_hour states one", "this machine costs nothing"


@pytest.mark.parametrize(
    ("stated", "printed"), [((), set()), (("queue.priority=high",), {"queue"}), (("rent.wait_minutes=5",), {"rent"})]
)
def test_a_dry_run_prints_only_what_the_target_uses(tmp_path: Path, stated: tuple[str, ...], printed: set[str]) -> None:
    """What to rent was printed for this machine, too. What is stated stays: it is read back."""
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\ncommand: [python3, train.py]\n")
    words = ("submit", spec, *stated, "--dry-run", "--json", "--workdir", "none", "--home", tmp_path / "home")
    (text,) = json.loads(invoke(*words).stdout)["files"].values()
    shown = set(json.loads(text)["spec"])
    assert shown & {"after", "container", "queue", "rent", "slurm"} == printed and {"limits", "resources"} <= shown
    read = Plan.from_json(text).spec
    assert (read.queue.priority == "high", read.rent == Rent()) == ("queue" in printed, "rent" not in printed)


def test_a_dry_run_on_this_machine_names_the_files_that_it_lacks(tmp_path: Path) -> None:
    """The job failed minutes later, in its first attempt."""
    (tmp_path / "train.py").touch()
    command = f"[python3, {tmp_path}/train.py, /not/there.json, '/no/*.json', --to=x]"
    (tmp_path / "job.yaml").write_text(f"name: a\ncommand: {command}\ninputs: {{ train: /no/data }}\n")
    words = ("submit", tmp_path / "job.yaml", "--dry-run", "--json", "--workdir", "none", "--home", tmp_path / "home")
    summary = json.loads(invoke(*words).stdout)["summary"]
    assert summary["missing"] == "/no/data, /not/there.json: not on this machine"
    image = json.loads(invoke(*words, "container.image=x/y:1", "inputs.train=null").stdout)["summary"]
    assert "missing" not in image, "its files are in the image"


def test_show_names_machine_gpu_and_price(tmp_path: Path) -> None:
    db = open_database(tmp_path / "trainmaster.db")
    story = samples.completed(db, name="priced")
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"nodes": ["gpu-07", "gpu-08"], "folder": "/x"})
        costs.set_price(conn, story.attempt, 250.0)
    db.close()
    shown = invoke("show", story.id, "--home", tmp_path).stdout
    rows = {line[:11].strip(): line[12:].strip() for line in shown.splitlines()}
    assert (rows["target"], rows["machine"]) == ("local", "gpu-07, gpu-08")
    assert rows["price"].startswith("$2.50 an hour, $") and rows["price"].endswith(" in all")
    assert rows["ranks"] == "2 on AMD EPYC 9654"


def test_what_people_write_for_a_command_and_an_image_gets_the_line_to_write() -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec({"name": "a", "command": "curl -H Authorization: Bearer c3VyZWx5", "image": "x"})
    assert 'command: write a list of words: command: ["python", "train.py"]' in str(refused.value)
    assert "c3VyZWx5" not in str(refused.value)
    assert "container: { image: … }" in str(refused.value)
    with pytest.raises(SpecError, match="image"):
        build_shape(Settings, {"image": ""})


def test_a_server_on_all_addresses_prints_one_that_can_be_opened() -> None:
    assert "0.0.0.0" not in serve._openable("http://0.0.0.0:8000", "0.0.0.0")
    assert serve._openable("http://127.0.0.1:8000", "127.0.0.1") == "http://127.0.0.1:8000"


def test_a_wait_for_machines_says_what_is_missing() -> None:
    silent: list[Offer | TargetError] = [Unreachable("n1: no route to host")]
    error = _no_capacity(1, [SlotTable()], silent)
    assert (
        str(error) == "ssh: waiting for 1 free machine: none of the 1 in the hosts file answers: n1: no route to host"
    )
    busy = _no_capacity(2, [SlotTable()], [Offer(free=0, held=False, knows=False)])
    assert isinstance(busy, NoCapacity) and "waiting for 2 free machines: 0 of 1 are free" in str(busy)


def test_in_a_clone_the_clone_is_what_an_extra_is_installed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = Path(__file__).parents[2]
    monkeypatch.chdir(clone)
    assert str(MissingExtra("SSH", "ssh")).endswith("pip install -e '.[ssh]'")
    monkeypatch.chdir("/")
    assert str(MissingExtra("SSH", "ssh")).endswith(f"/pip install -e '{clone}[ssh]'")


def test_a_home_that_was_not_there_is_told_and_an_empty_list_says_what_to_type(tmp_path: Path) -> None:
    """Of a mistyped --home an empty table was all there was to read."""
    new = str(tmp_path / "new")
    asked = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(build(), ["jobs", "--home", new])
    assert asked.exit_code == 0 and asked.stdout == ""
    assert f"new, empty home {new}; name another one with --home" in asked.stderr
    assert "no job yet; submit one with: trainmaster submit FILE.yaml" in asked.stderr
    again = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(build(), ["jobs", "--by", "ann", "--home", new])
    assert "new, empty home" not in again.stderr and "no job for --" in again.stderr


def test_a_submission_says_what_to_type_next(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: next\ncommand: ['true']\nworkdir: none\n")
    words = ["submit", str(tmp_path / "job.yaml"), "--home", str(tmp_path / "home")]
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(build(), words)
    assert done.exit_code == 0 and "submitted next as" in done.stdout
    assert "see it with: trainmaster show next" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("jobs -o json", "--json prints JSON"),
        ("queue --output wide", "--json prints JSON"),
        ("check --output evidence", "--json prints JSON to standard output, --out names a place"),
        ("jobs -n 3", "--limit N"),
        ("submit x.yaml --gpus 2", "resources.processes_per_node=N (one for each GPU)"),
        ("submit x.yaml -n 2", "resources.nodes=N, or resources.processes_per_node=N on each"),
        ("submit x.yaml --wait", "--follow"),
        ("cancel --all", "trainmaster jobs --status running"),
        ("help jobs", "Did you mean 'jobs --help'?"),
        ("submit sh train.sh", "is a program, not a spec"),
        ("submit missing.yaml", "trainmaster examples command.yaml > job.yaml"),
        ("delete x", "--yes deletes without asking"),
        ("export --from-hf Llama-3.2-1B start", "hf download ORGANISATION/Llama-3.2-1B --local-dir Llama-3.2-1B"),
    ],
)
def test_words_of_other_programs_lead_on(words: str, expected: str) -> None:
    assert expected in run(*words.split())


@pytest.mark.parametrize("verb", ["check --on", "bandwidth --on", "isolate --on", "reap --on", "submit job.yaml --on"])
def test_a_target_whose_file_is_missing_shows_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: x\ncommand: ['true']\n")
    said = run(*verb.split(), "ssh:hosts.yaml")
    assert (
        "there is no file" in said and "hosts.yaml here" in said and "`hosts: [{host: 10.0.0.2, user: ubuntu}]`" in said
    )
    assert "docs/guides/ssh.md" in said and (Path(__file__).parents[2] / "docs/guides/ssh.md").is_file()


def test_what_a_target_shows_for_its_file_is_read_by_it(tmp_path: Path) -> None:
    """The example of each target is a file that it can load, and its page exists."""
    for name in targets.names():
        starts = targets.traits(name).starts
        if not starts:
            continue
        (page,) = re.findall(r"docs/[\w/-]+\.md", starts)
        assert (Path(__file__).parents[2] / page).is_file()
        for text in re.findall(r"`([^`]*)`", starts):
            file = tmp_path / f"{name}.yaml"
            file.write_text(text)
            targets.load(f"{name}:{file}")
            if name == "ssh":
                assert parse_hosts(yaml_file.load(file).value, tmp_path).hosts[0].host == "10.0.0.2"


@pytest.mark.parametrize(("word", "meant"), [("k8s", "kubernetes"), ("slrum", "slurm"), ("lamda", "lambda")])
def test_a_target_of_another_name_is_named(word: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        targets.load(word)
    with pytest.raises(UsageError, match=r"sagemaker, slurm, ssh$"):
        targets.load("quantum")


def test_a_folder_that_fetch_made_does_not_hide_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice").mkdir()
    assert "has saved no checkpoint" in run("export", "twice", "out", "--home", str(home))
    (tmp_path / "nobody").mkdir()
    assert "neither a checkpoint" in run("export", "nobody", "out", "--home", str(home))


def test_a_command_is_named_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["it's/.venv/bin/trainmaster", "demo"])
    assert shlex.split(_console.program()) == ["it's/.venv/bin/trainmaster"]
    (tmp_path / "trainmaster").write_text("#!/bin/sh\n")
    (tmp_path / "trainmaster").chmod(0o755)
    assert _console.program() == "trainmaster"

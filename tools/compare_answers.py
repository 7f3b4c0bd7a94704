"""Answers of two commits beside each other: `--json` of check, bandwidth, isolate and accept, and every dry run.

    git worktree add ../before 1ad0ab1
    PYTHONPATH=tests python tools/compare_answers.py ../before --on local --on plans --on kubernetes

Both trees run the same commands in the same folder on the same testbed: `local`, `ssh` (two servers), `slurm` (three
nodes), `kubernetes` (two kubelets; as root), and `plans`, dry runs that need no cluster. A tree's own .venv is used
where it has one. Of JSON the keys, types, verdicts and exit codes are compared, of other output every line, without
ids and times. Prints a row for each command with the exit codes before and the lines that were compared, then those
that one tree alone has (`-` before, `+` after). Exit code 1 if there are any. Verdicts that depend on time may differ
between two runs of one tree on a busy machine: compare again, or a tree with itself.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

EXIT = "exit code "
AFTER = Path(__file__).resolve().parents[1]
Commands = dict[str, tuple[str, ...]]  # name of the row: command lines, one after the other in one folder

ACCEPT = (
    "accept --model transformer --layers 1 --width 16 --heads 2 --sequence 8 --num-classes 11 --warmup-iterations 1 "
    "--batch-size 4 --active-iterations 3 --min-throughput 0.01 --backend gloo --timeout 60 --json"
)
BANDWIDTH = "bandwidth --collective all_reduce --min 8K --max 8K --backend gloo --json"
SIM = "isolate --json --sim nodes=16,racks=4,seed=3"
REGISTRY = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
ACCOUNT = {
    "region": "us-east-1", "role": "arn:aws:iam::123456789012:role/SageMakerRole", "storage": "s3://bucket/trainmaster",
    "image": f"{REGISTRY}/train:1", "check_image": f"{REGISTRY}/check:1", "instance_type": "ml.p5.48xlarge",
    "subnets": ["subnet-0a"], "security_groups": ["sg-0a"],
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "command": {"command": ["true"], "resources": {"processes_per_node": 2}},
    "two nodes": {"command": ["true"], "resources": {"nodes": 2, "processes_per_node": 2}},
    "train": {"train": {"steps": 10, "batch_sequences": 16}, "resources": {"processes_per_node": 2}},
    "container": {"command": ["true"], "container": {"image": "registry.example.org/team/train:1"}},
}

DECIDED = {"check", "device", "exit_code", "node", "overall", "verdict"}  # fields whose values are compared too
LABELS = ("check", "node", "device", "rank", "collective")  # fields that name an entry of a list
IDS = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}\b"), "UUID"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)?"), "TIME"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,64}\b"), "ID"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a worktree of the older commit")
    parser.add_argument("--on", action="append", choices=sorted(BEDS), help="a testbed; without: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with this text")
    given = parser.parse_args()
    differs = False
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        for name in given.on or sorted(BEDS):
            place = Path(folder, name)
            place.mkdir()
            with BEDS[name](place) as commands:
                for row in (row for row in commands if given.only in row):
                    differs |= compare(row, commands[row], given.before.resolve(), place / "work")
    raise SystemExit(int(differs))


def compare(row: str, lines: tuple[str, ...], before: Path, work: Path) -> bool:
    """Run the commands in both trees and print what differs; whether anything does."""
    old, new = (answer(lines, tree, work) for tree in (before, AFTER))
    both = difflib.unified_diff(old, new, lineterm="", n=0)
    found = [line for line in both if not line.startswith(("---", "+++", "@@"))]
    codes = ", ".join(line.removeprefix(EXIT) for line in old if line.startswith(EXIT))
    print(f"| {row} | {codes} | {len(old)} | {f'{len(found)} differ' if found else 'equal'} |", flush=True)
    for line in found:
        print(f"    {line[0]} {line[1:]}", flush=True)
    return bool(found)


def answer(lines: tuple[str, ...], tree: Path, work: Path) -> list[str]:
    """What the commands of a tree say, in a new folder."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    own = tree / ".venv" / "bin" / "python"
    python = str(own if own.exists() else sys.executable)
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "TRAINMASTER_HOME": str(work / "home"), "COLUMNS": "300"}
    said: list[str] = []
    for line in lines:
        argv = [python, "-m", "trainmaster", *shlex.split(line)]
        ran = subprocess.run(argv, cwd=work, env=env, capture_output=True, text=True, timeout=600, check=False)
        said.append(f"{EXIT}{ran.returncode}")
        try:
            said += sorted(set(describe(json.loads(ran.stdout))))
        except ValueError:
            text = (
                (ran.stdout + ran.stderr)
                .replace(str(tree), "TREE")
                .replace(str(AFTER), "TREE")
                .replace(str(work.parent), "FOLDER")
            )
            for pattern, word in IDS:
                text = pattern.sub(word, text)
            said += text.splitlines()
    return said


def describe(value: Any, place: str = "") -> Iterator[str]:
    """A line for each key of a document: its type, or its value where that is a decision."""
    if not isinstance(value, dict | list) or not value:
        yield f"{place}: {type(value).__name__}"
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in DECIDED and not isinstance(inner, dict | list):
                yield f"{place}.{key} = {inner}"
            else:
                yield from describe(inner, f"{place}.{key}")
    else:
        for inner in value:
            named = [inner[key] for key in LABELS if key in inner] if isinstance(inner, dict) else []
            yield from describe(inner, f"{place}[{next((one for one in named if one is not None), '')}]")


@contextlib.contextmanager
def local(_: Path) -> Iterator[Commands]:
    yield {
        "check, local": ("check --json",),
        "check --on local": ("check --on local --json",),
        "check --level 2, local": ("check --level 2 --json",),
        "bandwidth, local": (f"{BANDWIDTH} --processes 2",),
        "bandwidth --on local": (f"{BANDWIDTH} --on local",),
        "isolate --sim": (f"{SIM},fault=node:n003:0.5",),
        "isolate --sim --routes": (f"{SIM},fault=leaf:leaf01:0.5 --routes",),
        "isolate --on local": ("isolate --on local --size 64K --max-rounds 1 --json",),
        "accept, local": (f"{ACCEPT} --processes 2",),
        "accept --on local": (f"{ACCEPT} --on local --processes 2",),
        "accept --inject, local": (f"{ACCEPT} --processes 2 --inject exit:1",),
        "accept --suite, local": (f"{ACCEPT} --processes 2 --suite quick --only shm --min-busbw 0.001 --out suite",),
        "reap, local": ("reap --no-database --on local --json",),
    }


@contextlib.contextmanager
def plans(folder: Path) -> Iterator[Commands]:
    """Dry runs; of Lambda Cloud, whose offers are asked for, on the simulator."""
    from trainmaster.cluster.acceptance import files
    from trainmaster.sim.lambda_cloud.settings import Settings
    from trainmaster.sim.lambda_cloud.simulator import Simulator

    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (folder / "known_hosts").write_text("")
    hosts = [{"name": f"n{number}", "host": f"10.0.0.{number}"} for number in (1, 2)]
    machines = [{"host": one["host"], "gpus": 8, "gpu": "H100 80 GB", "price_per_hour": 9.0} for one in hosts]
    pods = {"namespace": "default", "image": "registry.example.org/train:1", "gpus": 2, "folder": "/shared"}
    words = {
        "local": "local",
        "ssh": write(folder, "ssh", {"known_hosts": "known_hosts", "defaults": {"key": str(key)}, "hosts": hosts}),
        "slurm": write(folder, "slurm", {"folder": "/shared", "defaults": {"partition": "gpu"}}),
        "kubernetes": write(folder, "kubernetes", pods),
        "kubernetes, PyTorchJob": write(folder, "kubernetes", {**pods, "kind": "pytorchjob"}),
        "hyperpod": write(folder, "hyperpod", {**pods, "kind": "hyperpod"}),
        "sagemaker": write(folder, "sagemaker", ACCOUNT),
        "pool": write(folder, "pool", {"access": {"key": str(key)}, "hosts": machines}),
        "lambda": "lambda",
    }
    rows: Commands = {}
    for name, document in JOBS.items():
        file = folder / f"{name.replace(' ', '-')}.yaml"
        file.write_text(yaml.safe_dump({"name": "a", **document}))
        for target, word in words.items():
            rented = " rent.gpu=H100" if target in ("lambda", "pool") else ""
            rows[f"submit --dry-run, {name}, {target}"] = (
                f"submit {file} --on {word}{rented} --dry-run --workdir none",
            )
    for name in files.names():
        rows[f"accept --dry-run {name}"] = (f"accept --dry-run {name}", f"accept --batch-size 8 --dry-run {name}")
    on = f"--on {words['sagemaker']} --nodes 4"
    rows |= {
        "accept --dry-run plan, sagemaker": (f"accept {on} --dry-run plan",),
        "check --dry-run, sagemaker": (f"check {on} --dry-run", f"check {on} --level 2 --dry-run --json"),
        "cluster test --dry-run": ("cluster test --dry-run", "cluster test --job-name b --dry-run"),
    }
    for target in ("local", "ssh"):
        rows[f"accept --dry-run plan, {target}"] = (f"accept --on {words[target]} --dry-run plan",)
        rows[f"check --dry-run, {target}"] = (f"check --on {words[target]} --dry-run",)
    with Simulator(Settings(folder=folder / "sim")) as simulator:
        os.environ.update({**simulator.environment(), "LAMBDA_SSH_KEY_FILE": str(key)})
        yield rows


@contextlib.contextmanager
def ssh(folder: Path) -> Iterator[Commands]:
    from sshd import lab

    with lab(folder) as made:
        for name in ("n1", "n2"):
            made.start(name)
        made.wait()
        yield on_nodes(made.write_hosts(folder / "hosts.yaml"), "ssh")


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Commands]:
    import slurm as testbed

    with testbed.start(folder) as made:
        document = {"folder": str(folder / "shared"), "python": sys.executable, "env": {"SLURM_CONF": str(made.conf)}}
        word = write(folder, "slurm", document)
        planned = {"accept --dry-run plan, slurm": (f"{ACCEPT} --on {word} --dry-run plan",)}
        yield {**on_nodes(word, "slurm"), **drains(word, "slurm"), **planned}


@contextlib.contextmanager
def kubernetes(folder: Path) -> Iterator[Commands]:
    from kube_nodes import cluster

    with cluster() as made:
        word = write(folder, "kubernetes", made.settings("default"))
        jobs = write(folder, "kubernetes", made.settings("default", kind="pytorchjob"))
        os.environ["KUBECONFIG"] = str(made.kube.kubeconfig())  # `remedy` takes kubectl's cluster
        rows = {**on_nodes(word, "kubernetes"), **drains(word, "kubernetes", scheduler="kubernetes")}
        for row in [row for row in rows if row.startswith("accept")]:
            rows[f"{row}, PyTorchJob"] = tuple(line.replace(word, jobs) for line in rows[row])
        for kind, name in ((word, "Job"), (jobs, "PyTorchJob")):
            rows[f"accept --dry-run plan, kubernetes, {name}"] = (f"{ACCEPT} --on {kind} --dry-run plan",)
        yield rows


def on_nodes(word: str, target: str) -> Commands:
    """What is run on the nodes of a cluster."""
    return {
        f"check, {target}": (f"check --on {word} --only shm,hostname,gpu_count --json",),
        f"bandwidth, {target}": (f"{BANDWIDTH} --on {word}",),
        f"isolate, {target}": (f"isolate --on {word} --size 64K --max-rounds 1 --json",),
        f"accept, {target}": (f"{ACCEPT} --on {word}",),
        f"accept --inject, {target}": (f"{ACCEPT} --on {word} --inject exit:1",),
        f"reap, {target}": (f"reap --no-database --on {word} --json",),
    }


def drains(word: str, target: str, scheduler: str | None = None) -> Commands:
    """Verbs that are a dry run without --yes."""
    checked = f"check --on {word} --only gpu_count --expect gpus=8 --out evidence --json"
    return {
        f"remedy, {target}": (
            checked,
            f"remedy evidence --on {scheduler or word} --include-silent --max-nodes 3 --json",
        ),
        f"readmit, {target}": (checked, f"readmit evidence --on {scheduler or word}"),
    }


def write(folder: Path, target: str, document: dict[str, Any]) -> str:
    """A settings file of a target; the word that names both."""
    path = folder / f"{target}-{len(list(folder.glob('*.yaml')))}.yaml"
    path.write_text(yaml.safe_dump(document))
    return f"{target}:{path}"


BEDS = {"local": local, "plans": plans, "ssh": ssh, "slurm": slurm, "kubernetes": kubernetes}

if __name__ == "__main__":
    main()

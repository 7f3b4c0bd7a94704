"""`trainmaster isolate` says that it simulates, names the part, gives one action and the right exit code."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from trainmaster.cli.main import build
from trainmaster.core.errors import UsageError

SMALL = "nodes=32,racks=4,spines=4,seed=3"


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(build(), ["isolate", *words])


@pytest.mark.parametrize(
    ("words", "code", "verdict"),
    [
        ([SMALL], 0, "PASS"),
        ([f"{SMALL},fault=node:n017:0.5"], 1, "FAIL"),
        ([SMALL, "--rounds", "1"], 3, "INCOMPLETE"),
    ],
)
def test_exit_codes(words: list[str], code: int, verdict: str) -> None:
    done = run("--sim", *words)
    assert done.exit_code == code, done.output
    assert verdict in done.stdout and "simulated" in done.stdout
    assert "SIMULATED" in done.stderr and "round  1" in done.stderr
    assert done.stdout.count("to do:") == 1


@pytest.mark.slow
def test_the_bad_node_is_named_in_words_and_in_json() -> None:
    fault = f"{SMALL},fault=node:n017:0.5"
    assert "bad node n017: loses" in run("--sim", fault).stdout
    told = json.loads(run("--sim", fault, "--json").stdout)
    assert told["simulated"] == fault
    (suspect,) = told["diagnosis"]["suspects"]
    assert (suspect["kind"], suspect["name"]) == ("node", "n017")
    assert suspect["evidence"][0]["gbps"] < suspect["evidence"][0]["healthy_gbps"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to test"),
        (["--on", "ssh:hosts.yaml", "--sim", "nodes=4"], "leave --sim"),
        (["--sim", "nodes=lots"], "not a number"),
        (["--sim", "nodes=1,racks=1"], "two at the least"),
    ],
)
def test_wrong_usage_is_refused_before_anything_runs(words: list[str], says: str) -> None:
    done = run(*words)
    assert isinstance(done.exception, UsageError), done.output
    assert says in str(done.exception) and done.exception.exit_code == 2

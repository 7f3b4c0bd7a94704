"""`trainmaster baseline`: a golden run is kept, and a worse run is named."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from cli.test_error_contract import save_results
from trainmaster.cli.main import build


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["baseline", *words])
    return done.exit_code, done.output


def test_a_worse_run_is_named(tmp_path: Path) -> None:
    good, site = save_results(tmp_path / "good.json"), ["--file", str(tmp_path / "site.toml")]
    document = json.loads(good.read_text())
    slow = tmp_path / "slow.json"
    document["throughput_samples_per_second"] *= 0.8
    document["overall"] = "FAIL"
    document["ranks"][0]["alone_s"]["p50"] *= 1.06
    slow.write_text(json.dumps(document))
    assert run("record", str(good), "--name", "first", *site)[0] == 0
    assert run("compare", str(good), *site) == (
        0,
        "pass 100.0% of the throughput of the golden run first of 2026-01-01\n",
    )
    code, text = run("compare", str(slow), *site)
    assert code == 1
    assert "fail throughput: 20% worse" in text
    assert "warn rank0: 6% worse" in text
    assert json.loads(run("compare", str(slow), "--json", *site)[1])["worse"][0] == {
        "figure": "throughput",
        "loss": 0.2,
    }
    assert run("record", str(slow), *site)[0] == 1  # a failed run is no golden one
    assert "first" in run("list", *site)[1]
    assert [golden["name"] for golden in json.loads(run("list", "--json", *site)[1])["golden"]] == ["first"]


def test_nothing_to_compare_with_is_no_pass(tmp_path: Path) -> None:
    good = save_results(tmp_path / "good.json")
    done = CliRunner().invoke(
        build(guarded=True), ["baseline", "compare", str(good), "--file", str(tmp_path / "none.toml")]
    )
    assert done.exit_code == 3


def test_no_golden_run_is_said(tmp_path: Path) -> None:
    code, text = run("list", "--file", str(tmp_path / "none.toml"))
    assert code == 0
    assert "no golden run is recorded" in text

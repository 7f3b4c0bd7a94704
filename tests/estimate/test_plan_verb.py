"""`trainmaster plan` as its user meets it: answers without torch, refuses what it cannot know, says what would fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainmaster.cli.main import build as build_cli
from trainmaster.core.errors import SpecError, UsageError

CONFIG = "model: {preset: llama3.2-1b}\nbatch_sequences: 8\nsequence_tokens: 4096\nsteps: 1000\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "llama.yaml").write_text(CONFIG)
    return tmp_path / "llama.yaml"


def call(config: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_cli(), ["plan", str(config), *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def ask(config: Path, *words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(call(config, *words, "--json")[1])
    return answer


def test_the_answer_has_its_fields_and_they_agree(config: Path) -> None:
    answer = ask(config, "--gpu", "H200", "--gpu-price", "2.5", "--tokens", "1B")
    assert answer == ask(config, "--gpu", "H200", "--price", "2.5", "--tokens", "1B")  # its earlier name
    assert (answer["model"], answer["parameters"], answer["gpu"], answer["gpus"]) == (
        "llama3.2-1b", 1_235_814_400, "H200", 1,
    )  # fmt: skip
    memory, speed, run, saved = (answer[name] for name in ("memory", "speed", "run", "checkpoint"))
    assert memory["peak_bytes"] == sum(memory["parts_bytes"].values())
    assert memory["needed_bytes"] == memory["peak_bytes"] + memory["reserve_bytes"]
    assert answer["fits"] is (memory["needed_bytes"] <= memory["gpu_bytes"])
    assert speed["tokens_per_s"] == pytest.approx(8 * 4096 / speed["step_s"])
    assert run["steps"] == -(-(10**9) // (8 * 4096))
    assert run["usd"] == pytest.approx(run["gpu_hours"] * 2.5)
    assert run["days"] * 86400 >= run["steps"] * speed["step_s"]
    assert saved["bytes"] > 12 * answer["parameters"]
    assert saved["write_s"] == pytest.approx(saved["bytes"] / saved["write_gbps_per_node"] / 1e9)
    assert answer["learning_rates"][0][0] == 1
    assert answer["learning_rates"][-1][0] == run["steps"]
    assert max(rate for _, rate in answer["learning_rates"]) == answer["peak_learning_rate"]
    (row,) = [row for row in answer["table"] if row["gpu"] == "H200"]
    assert [cell["gpus"] for cell in row["counts"]] == [1, 2, 4, 8]
    assert all(cell["fits"] for cell in row["counts"])


def test_what_is_suggested_can_be_pasted_back(config: Path) -> None:
    before = ask(config, "sequence_tokens=16384", "--gpu", "H100-SXM")
    assert before["fits"] is False
    words = before["suggestion"]["overrides"]
    assert words
    after = ask(config, "sequence_tokens=16384", *words, "--gpu", "H100-SXM")
    assert after["fits"] is True
    assert after["memory"]["needed_bytes"] == before["suggestion"]["needed_bytes"]
    assert after["speed"]["tokens_per_s"] == pytest.approx(before["suggestion"]["tokens_per_s"])
    assert before["suggestion"]["command"] == " ".join(
        ["trainmaster train", str(config), "sequence_tokens=16384", *words]
    )


@pytest.mark.proof
def test_a_config_that_cannot_fit_exits_1_and_says_what_would(config: Path) -> None:
    words = ["model.preset=llama3.1-8b", "batch_sequences=64", "--gpu", "A100-SXM4-40GB"]
    code, text = call(config, *words)
    assert code == 1
    assert "does not fit 1 × A100-SXM4-40GB" in text
    assert "would fit: 8 × A100-SXM4-40GB" in text
    assert ask(config, *words)["suggestion"] is None


def test_an_instance_brings_its_gpus_and_its_price(config: Path) -> None:
    answer = ask(config, "batch_sequences=64", "--instance", "ml.p5.48xlarge", "--nodes", "2")
    assert (answer["gpu"], answer["gpus"], answer["nodes"]) == ("H100-SXM", 16, 2)
    assert answer["run"]["usd_per_gpu_hour"] == pytest.approx(55.04 / 8)
    assert any("efa" in note for note in answer["notes"])


def test_a_rate_far_above_the_rule_is_warned_of(config: Path) -> None:
    words = ["model.preset=llama3.1-8b", "--gpu", "H200"]
    assert not any("optimizer.lr" in note for note in ask(config, *words, "optimizer.lr=6e-4")["notes"])
    (note,) = (note for note in ask(config, *words, "optimizer.lr=3e-3")["notes"] if "optimizer.lr" in note)
    assert note.startswith("optimizer.lr 0.003 is 10 times what suits this model (0.0003)")


def test_without_a_gpu_it_tells_memory_and_where_it_fits(config: Path) -> None:
    code, text = call(config)
    answer = ask(config)
    assert code == 0
    assert answer["fits"] is None
    assert answer["speed"] is None
    assert "Where it fits" in text
    assert answer["table"]


def test_people_see_the_parts_the_curve_and_the_examples(config: Path) -> None:
    code, text = call(config, "--gpu", "H200")
    assert code == 0
    for words in ("fits 1 × H200", "activations", "tokens/s", "MFU", "Checkpoint", "Learning rate", "⠉"):
        assert words in text, words
    assert "trainmaster plan llama.yaml --gpu H200" in CliRunner().invoke(build_cli(), ["plan", "--help"]).output


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--gpu", "H300"], UsageError, "did you mean H200"),
        (["--gpu", "h100"], UsageError, "did you mean H100-SXM or H100-"),
        (["--gpu", "TPU v5"], UsageError, "nothing is guessed"),
        (["--instance", "p5.48xlarg"], UsageError, "did you mean p5.48xlarge"),
        (["--instance", "p5.48xlarge", "--gpu", "H200"], UsageError, "leave one of them out"),
        (["--instance", "p5.48xlarge", "--gpus", "12", "--nodes", "1"], UsageError, "has 8"),
        (["--gpu", "H200", "--gpus", "7", "--nodes", "2"], UsageError, "does not divide by 2 nodes"),
        (["--gpu", "H200", "--gpus", "3"], SpecError, "batch_sequences: 8 does not divide by 3 ranks"),
        (["--gpu", "H200", "--tokens", "many"], UsageError, "write it as 20M, 300B or 1T"),
        (["--gpu", "H200", "--tokens", "0"], UsageError, "write it as"),
        (["model.preset=llama9"], SpecError, "there is no preset"),
    ],
)
def test_refusals(config: Path, words: list[str], kind: type[UsageError], message: str) -> None:
    with pytest.raises(kind) as caught:
        call(config, *words)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_it_needs_no_torch(config: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['trainmaster', 'plan', {str(config)!r}, '--gpu', 'H200', '--gpus', '8']\n"
        "from trainmaster.cli.main import run; run()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "fits 8 × H200" in ended.stdout


def test_failures_give_the_best_interval_and_the_ettr(config: Path) -> None:
    plain = ask(config, "--gpu", "H200", "--gpus", "8")["failures"]
    assert plain["mttf_h"] == pytest.approx(7.9 * 128) and "2410.21680" in plain["mttf_source"]
    stated = ask(config, "--gpu", "H200", "--gpus", "8", "--mttf", "1", "--restart", "600")["failures"]
    assert (stated["mttf_h"], stated["restart_s"], stated["mttf_source"]) == (1, 600, "stated")
    assert stated["ettr_as_configured"] <= stated["ettr"] < plain["ettr"] < 1
    assert stated["best_every_steps"] < plain["best_every_steps"]
    assert f"save every {plain['best_every_steps']:,} steps" in " ".join(
        call(config, "--gpu", "H200", "--gpus", "8")[1].split()
    )
    assert ask(config)["failures"]["ettr"] is None  # without a GPU there is no speed

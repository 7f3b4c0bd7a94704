"""`trainmaster data prepare` and `validate`: what they print, what they find, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from trainmaster.cli.main import build


def data(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1"}).invoke(build(), ["data", *map(str, words)])


def answer(result: Result) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def write(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def test_each_verb_has_help_with_examples() -> None:
    for verb in ("prepare", "validate"):
        result = data(verb, "--help")
        assert result.exit_code == 0 and f"trainmaster data {verb}" in result.output


def test_prepared_data_is_told_of_and_found_good(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", [f"document {n}" for n in range(300)] + ["document 3", " "])
    made = data("prepare", raw, "--out", tmp_path / "out", "--held-out-share", 0.1, "--json", "-n", 1)
    assert made.exit_code == 0, made.output
    document = answer(made)
    assert document["documents"] + document["held_out_documents"] == 301 and document["empty"] == 1
    result = data("validate", tmp_path / "out", "--json")
    assert result.exit_code == 0
    seen = answer(result)
    assert (seen["ok"], seen["tokens"], seen["duplicates"], seen["shared"]) == (True, document["tokens"], 1, 0)
    assert seen["samples"][0]["text"].startswith("document") and seen["max_token"] == 255
    shown = data("validate", tmp_path / "out")
    assert "document 0" in shown.output and "PASS" in shown.output
    same = data("prepare", raw, "--out", tmp_path / "out", "--held-out-share", 0.1, "--json", "-n", 1)
    assert answer(same) == document, "done already"
    other = data("prepare", raw, "--out", tmp_path / "out", "-n", 1)
    assert other.exit_code != 0 and "other settings" in str(other.exception)


@pytest.mark.slow
def test_every_damaged_file_of_a_prepared_folder_is_named(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.jsonl", ["x" * 1000 + f"{number} {n}" for n in range(1100)])
    made = data("prepare", tmp_path / "*.jsonl", "--out", tmp_path / "out", "--shard-mib", 1, "--json", "-n", 1)
    assert answer(made)["shards"] == 3, made.output
    first, second = tmp_path / "out" / "train-00000.tokens", tmp_path / "out" / "train-00001.lengths"
    content = bytearray(first.read_bytes())
    content[5] ^= 1
    first.write_bytes(content)
    second.unlink()
    result = data("validate", tmp_path / "out", "--json")
    assert result.exit_code == 1
    assert answer(result)["damage"] == [
        "train-00000.tokens does not match its SHA-256",
        "train-00001.lengths is missing",
    ]
    (tmp_path / "out" / "index.json").write_text("{}")
    assert data("validate", tmp_path / "out").exit_code == 1


def test_a_vocabulary_too_small_for_the_data_is_damage(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", ["some text"])
    (tmp_path / "model.yaml").write_text("model: {vocab: 100}\n")
    for words in (["prepare", raw, "--out", tmp_path / "out", "-n", 1], []):
        place = raw if not words else tmp_path / "out"
        if words:
            assert data(*words).exit_code == 0
        result = data("validate", place, "--model", tmp_path / "model.yaml", "--json")
        assert result.exit_code == 1
        assert answer(result)["damage"] == ["model.vocab 100 is less than the 256 tokens of the tokenizer"]


def test_byte_data_for_a_model_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", ["some text"])
    (tmp_path / "model.yaml").write_text("model: {preset: llama3.1-8b}\n")
    assert data("prepare", raw, "--out", tmp_path / "out", "-n", 1).exit_code == 0
    for place in (raw, tmp_path / "out"):
        result = data("validate", place, "--model", tmp_path / "model.yaml", "--json")
        assert result.exit_code == 1
        assert "model.vocab 128,256 is made for another tokenizer" in answer(result)["damage"][0]
    (tmp_path / "model.yaml").write_text("model: {vocab: 320}\n")  # padded to a round number
    assert data("validate", raw, "--model", tmp_path / "model.yaml").exit_code == 0


def test_raw_files_are_read_whole_and_each_bad_document_named(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.jsonl", ["one", "two", "one", ""])
    with raw.open("a") as file:
        file.write('{"text": 1}\nnonsense\n')
    result = data("validate", raw, "--json")
    seen = answer(result)
    assert result.exit_code == 1 and (seen["documents"], seen["duplicates"], seen["empty"]) == (3, 1, 1)
    assert len(seen["damage"]) == 2 and "field 'text' is int" in seen["damage"][0] and "not JSON" in seen["damage"][1]
    nothing = data("validate", tmp_path / "nothing*")
    assert "no file with documents" in str(nothing.exception)
    missing = data("prepare", tmp_path / "corpus", "--out", tmp_path / "tokens")
    assert str(missing.exception) == f"{tmp_path / 'corpus'}: there is no such file or folder"

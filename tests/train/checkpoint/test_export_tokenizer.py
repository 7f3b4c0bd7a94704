"""An exported folder holds all that `transformers` needs to encode a prompt, generate, and stop at the end token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner, Result

from trainmaster.cli.main import build as build_cli
from trainmaster.core.errors import UsageError
from trainmaster.datasets.corpus.hf_tokenizer import tokenizer_of
from trainmaster.datasets.corpus.tokenizer import Bytes

from ..runs import RunHere, tiny


def export(*words: object) -> Result:
    return CliRunner().invoke(build_cli(), ["export", *map(str, words)], catch_exceptions=False)


def plain(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small BPE whose end token is neither its first nor its last."""
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [f"Mira had {n} geese. Tomas brought {n + 1} more." for n in range(60)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>", "<other>"]
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("\n".join(texts * 40))
    return folder


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_run_on_bytes_exports_a_tokenizer_of_bytes(tmp_path: Path, run_here: RunHere) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    run_here(tmp_path, tiny(steps=3, eval_sequences=0))
    assert export(tmp_path / "checkpoints", tmp_path / "out").exit_code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("Mira had 3 geese.\n", "naïve Ægir ÿ 数 \x00\t  two", "", " "):
        assert tokenizer(text)["input_ids"] == Bytes().encode_many([text])[0]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 255 == plain(tmp_path / "out" / "config.json")["eos_token_id"]
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 255
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = tokenizer("Mira had", return_tensors="pt")
    assert model.generation_config.eos_token_id == 255
    made = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=255)
    assert tokenizer.decode(made[0]).startswith("Mira had")


def test_the_tokenizer_of_the_run_travels_with_its_end_token(tmp_path: Path, run_here: RunHere, trained: Path) -> None:
    from transformers import AutoTokenizer

    data = {"source": "text", "path": str(trained / "text.txt"), "text_unit": "line", "tokenizer": str(trained)}
    data["cache"] = str(tmp_path / "cache")
    run_here(tmp_path, tiny(steps=3, eval_sequences=0, data=data, model={"vocab": 300}))
    assert export(tmp_path / "checkpoints", tmp_path / "out").exit_code == 0
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    assert plain(out / "config.json")["eos_token_id"] == plain(out / "generation_config.json")["eos_token_id"] == 1
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 1)
    assert (
        tokenizer("Tomas brought 7")["input_ids"]
        == Tokenizer.from_file(str(trained / "tokenizer.json")).encode("Tomas brought 7").ids
    )
    other = export(tmp_path / "checkpoints", tmp_path / "other", "--tokenizer", trained, "--end-token", "<other>")
    assert other.exit_code == 0 and plain(tmp_path / "other" / "config.json")["eos_token_id"] == 2


def test_an_unknown_tokenizer_is_stated_and_a_wrong_one_refused(
    tmp_path: Path, run_here: RunHere, trained: Path
) -> None:
    run_here(tmp_path, tiny(steps=3, eval_sequences=0))
    with pytest.raises(UsageError, match="its 300 tokens are more than the model's 256"):
        export(tmp_path / "checkpoints", tmp_path / "out", "--tokenizer", trained)
    with pytest.raises(UsageError, match="gone: not there"):
        export(tmp_path / "checkpoints", tmp_path / "out", "--tokenizer", tmp_path / "gone")
    assert not (tmp_path / "out").exists()
    assert export("--from-hf", _plain_export(tmp_path), tmp_path / "start").exit_code == 0
    done = export(tmp_path / "start", tmp_path / "again")  # weights alone: no data, so no tokenizer
    assert done.exit_code == 0 and "no tokenizer" in done.output
    assert plain(tmp_path / "again" / "config.json")["eos_token_id"] is None
    assert not (tmp_path / "again" / "generation_config.json").exists()


def _plain_export(folder: Path) -> Path:
    assert export(folder / "checkpoints", folder / "model").exit_code == 0
    return folder / "model"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"source": "tales"}, ("bytes", None)),
        ({"source": "jsonl", "tokenizer": "hub:a/b", "end_token": "</s>"}, ("hub:a/b", "</s>")),
        ({"source": "mix", "parts": [{"source": "text"}, {"source": "hub"}], "tokenizer": "t.json"}, ("t.json", None)),
        ({"source": "mix", "parts": [{"source": "text"}, {"source": "prepared"}], "tokenizer": "t.json"}, None),
        ({"source": "prepared", "tokenizer": "bytes"}, None),
    ],
)
def test_prepared_data_says_nothing_of_its_tokenizer(
    data: dict[str, Any], found: tuple[str, str | None] | None
) -> None:
    assert tokenizer_of(data) == found

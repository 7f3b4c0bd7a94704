"""The real Hub libraries against a stand-in of the Hub that refuses, cuts connections and changes its data."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus import texts
from test_tokenizer import train_one

from sims.hub import Hub


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Where they are not installed these tests are skipped; no other worker takes the second that an import takes."""
    for name in ("datasets", "huggingface_hub"):
        pytest.importorskip(name)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    data = folder / "data" / "en"
    data.mkdir(parents=True)
    for number in range(4):
        with gzip.open(data / f"c4-train.{number:05d}-of-00004.json.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts(60, start=1000 * number))
    with gzip.open(data / "c4-validation.00000-of-00001.json.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(60, start=9000))
    (folder / "data" / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n"
        "  - {split: train, path: en/c4-train.*.json.gz}\n"
        "  - {split: validation, path: en/c4-validation.*.json.gz}\n---\n"
    )
    train_one(folder / "tok", end="</s>")
    with Hub({"datasets/me/c4": folder / "data", "models/me/tok": folder / "tok"}) as server:
        yield server


@pytest.fixture(autouse=True)
def well(hub: Hub) -> Iterator[None]:
    yield
    hub.refuse = hub.cut = 0
    hub.away = False


def run(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: the libraries read their settings when they are imported."""
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_COLOR": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),  # of sims
    }
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=120, check=False)


STREAM = """
import json, os, sys
from pathlib import Path
from sims.hub import Hub
folder = Path(sys.argv[1])
hub = Hub({"datasets/me/c4": folder / "data"}).__enter__()
os.environ["HF_ENDPOINT"] = hub.url
import datasets
datasets.config.STREAMING_READ_RETRY_INTERVAL = datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0.01
from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import DataError
from trainmaster.core.schema import build
from trainmaster.datasets import Shape, load
from trainmaster.datasets.corpus import hub_files, retry
retry._FIRST_S = 0.01
CONFIG = {"source": "hub", "dataset": "me/c4", "subset": "en", "held_out_split": "validation"}

def read(steps, state=None):
    source = load(build(DataConfig, CONFIG), Shape(sequence_tokens=64, batch_sequences=4))
    if state:
        source.restore(json.loads(json.dumps(state)))
    rows = [row for step in steps for row in source.rows(range(4 * step, 4 * step + 4)).tokens.tolist()]
    held_out = source.rows(range(2), held_out=True).tokens.tolist()
    end = 4 * (steps[-1] + 1)
    state = source.join([source.state(range(end, end + 4))])
    source.close()
    return rows, held_out, state

whole, held_out, _ = read(range(12))
hub.refuse, hub.cut = 2, 2
first, again, state = read(range(6))
assert (hub.refuse, hub.cut) == (0, 0), "it was flaky"
assert first == whole[:24] and again == held_out
rest, _, _ = read(range(6, 12), state)
assert rest == whole[24:]
assert len({tuple(row) for row in whole}) == 48
assert bytes(held_out[0]).decode("latin-1").startswith("<9"), "of its own split"
before = len(hub.asked)
try:
    hub_files.commit_of("me/nothing", "main")
except DataError as error:
    assert "me/nothing" in str(error) and len(hub.asked) == before + 1, "said at once, not tried again"
else:
    raise AssertionError("found what is not there")
print("as it should be")
"""


@pytest.mark.proof
def test_a_stream_over_a_flaky_hub_is_the_stream_and_goes_on(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "-c", STREAM, str(hub.repositories["datasets/me/c4"].parent))
    assert done.stdout.strip().endswith("as it should be"), done.stderr


def prepare(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "trainmaster", "data", "prepare", "hub:me/c4", "--subset", "en", "--out", str(home / "out")]
    return run(hub, home, *command, "--json", "--processes", "1", *words)


@pytest.mark.proof
def test_prepare_downloads_with_checksums_over_cut_connections(hub: Hub, tmp_path: Path) -> None:
    hub.refuse, hub.cut = 2, 2
    done = prepare(hub, tmp_path, "--tokenizer", "hub:me/tok", "--held-out-share", "0")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["documents"], told["tokenizer"], hub.cut) == (240, "hub:me/tok", 0)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["source"]["commit"] == hub.commit("datasets/me/c4")
    assert index["source"]["files"][0]["name"] == "en/c4-train.00000-of-00004.json.gz"
    # The cache is damaged behind our back: seen by its checksum, fetched again.
    blob = next(path.resolve() for path in (tmp_path / "hf").rglob("c4-train.00001-of-00004.json.gz"))
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + b"?")
    again = prepare(hub, tmp_path, "--tokenizer", "hub:me/tok", "--held-out-share", "0")
    assert again.returncode == 0 and blob.read_bytes() == content
    assert json.loads(again.stdout)["fingerprint"] == told["fingerprint"]


def test_a_split_that_is_not_there_is_said_with_what_is(hub: Hub, tmp_path: Path) -> None:
    done = prepare(hub, tmp_path, "--split", "tests")
    assert done.returncode == 2 and "none of its 6 files looks like en/tests" in " ".join(done.stderr.split())

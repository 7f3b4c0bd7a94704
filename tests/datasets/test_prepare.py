"""Preparing: the same bytes on any number of processes and after a kill; every line once; what is bad is named."""

from __future__ import annotations

import gzip
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus import END, make, row_texts, source, texts, write_jsonl

from trainmaster.core.errors import DataError, UsageError
from trainmaster.datasets.corpus import files as _files
from trainmaster.datasets.corpus import index as _index
from trainmaster.datasets.corpus import prepare as _prepare
from trainmaster.datasets.corpus.files import TextLocation
from trainmaster.datasets.corpus.prepare import Recipe, prepare


def documents_in(folder: Path) -> list[str]:
    """Every document of a folder, read back through its lengths."""
    index, found = _index.read(folder), []
    for split in _index.SPLITS:
        for shard in index.shards(split):
            tokens = memoryview((folder / shard.tokens_file.name).read_bytes()).cast("H").tolist()
            for length in memoryview((folder / shard.lengths_file.name).read_bytes()).cast("I").tolist():
                assert tokens[length - 1] == END
                found.append(bytes(tokens[: length - 1]).decode())
                tokens = tokens[length:]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_line_comes_once_however_a_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(60))
    for size in (1, 37, 1000, 10**6):
        monkeypatch.setattr(_files, "BLOCK_BYTES", size)
        jsonl = _files.format_of("jsonl")
        blocks = list(jsonl.cut(path, TextLocation()))
        assert [d.text for block in blocks for d in jsonl.documents(block, TextLocation())] == texts(60)


def test_many_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / "raw" / f"{n}.jsonl", texts(30, start=100 * n)) for n in range(3)]
    for name, processes in (("one", 1), ("two", 2)):
        told: list[int] = []
        recipe = Recipe(held_out_share=0.2, shard_bytes=1)
        prepare(files, tmp_path / name, recipe, processes=processes, source={}, stamps=[], advance=told.append)
        assert sum(told) == sum(path.stat().st_size for path in files)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sorted(documents_in(tmp_path / "one")) == sorted(text for n in range(3) for text in texts(30, start=100 * n))


def test_a_killed_preparation_keeps_its_finished_shards(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / "raw" / f"{n}.jsonl", texts(40, start=100 * n)) for n in range(4)]
    out = tmp_path / "out"
    # It stands before the third shard, and dies there.
    code = (
        "import sys, time; from pathlib import Path; from trainmaster.datasets.corpus import prepare as _prepare\n"
        "real = _prepare.make_shard\n"
        "def slow(job, out, recipe):\n"
        "    if job.number == 2: print('there', flush=True); time.sleep(60)\n"
        "    return real(job, out, recipe)\n"
        "_prepare.make_shard = slow\n"
        "files = [Path(name) for name in sys.argv[2:]]\n"
        "_prepare.prepare(files, Path(sys.argv[1]), _prepare.Recipe(shard_bytes=1, held_out_share=0.1), processes=1, "
        "source={}, stamps=['x'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(out), *map(str, files)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (out / "index.json").exists()
    with pytest.raises(DataError, match="cut off: run the same"):
        source(source="prepared", path=str(out))
    kept = {name: (out / name).stat().st_mtime_ns for name in ("train-00000.tokens", "train-00001.tokens")}
    recipe = Recipe(shard_bytes=1, held_out_share=0.1)
    with pytest.raises(UsageError, match="other files or with other settings"):
        prepare(files, out, Recipe(shard_bytes=1), processes=1, source={}, stamps=["x"])
    time.sleep(0.01)
    index = prepare(files, out, recipe, processes=1, source={}, stamps=["x"])
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept, "finished shards were not made again"
    assert sorted(documents_in(out)) == sorted(text for n in range(4) for text in texts(40, start=100 * n))
    assert not list(out.glob("*.part")) and not list(out.glob("shard-*")) and not (out / "work.json").exists()
    assert prepare(files, out, recipe, processes=1, source={}, stamps=["x"]) == index, "finished: nothing is done"


def test_a_bad_document_is_named_or_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": 3}\n[1]\n{"txt": "x"}\nnot json\n\n{"text": " "}\n{"text": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl byte 16: field 'text' is int; .*--skip-unreadable"):
        prepare([path], tmp_path / "strict", Recipe(), processes=1, source={}, stamps=[])
    recipe = Recipe(skip_unreadable=True, held_out_share=0)
    index = prepare([path], tmp_path / "lax", recipe, processes=1, source={}, stamps=[])
    assert (index.skipped, index.empty, documents_in(tmp_path / "lax")) == (4, 1, ["one", "two"])


def test_a_gzip_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(write_jsonl(tmp_path / "raw.jsonl", texts(500)).read_text())
    index = prepare([path], tmp_path / "good", Recipe(held_out_share=0), processes=1, source={}, stamps=[])
    assert index.documents("train") == 500
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is damaged or cut off"):
        prepare([path], tmp_path / "bad", Recipe(), processes=1, source={}, stamps=[])


def test_text_files_are_cut_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n\nthree\n")
    for unit, wanted in (
        ("file", ["one\ntwo\n\n\nthree\n"]),
        ("paragraph", ["one\ntwo\n", "three\n"]),
        ("line", ["one", "two", "three"]),
    ):
        recipe = Recipe(manner=TextLocation(text_unit=unit), held_out_share=0)
        prepare([path], tmp_path / unit, recipe, processes=1, source={}, stamps=[])
        assert documents_in(tmp_path / unit) == wanted


def test_parquet_is_read_by_row_group_and_its_damage_named(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [*texts(50), None], "id": list(range(51))})
    parquet.write_table(table, path, row_group_size=20)
    recipe = Recipe(held_out_share=0, skip_unreadable=True, shard_bytes=1)
    index = prepare([path], tmp_path / "out", recipe, processes=1, source={}, stamps=[])
    assert len(index.train) == 3 and index.skipped == 1 and documents_in(tmp_path / "out") == texts(50)
    with pytest.raises(DataError, match="has no column 'body'; it has text, id"):
        wrong = Recipe(manner=TextLocation(text_field="body"))
        prepare([path], tmp_path / "column", wrong, processes=1, source={}, stamps=[])
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"a\.parquet is damaged or no Parquet file"):
        prepare([path], tmp_path / "damaged", recipe, processes=1, source={}, stamps=[])


def test_raw_files_are_tokenised_once_and_again_when_they_change(tmp_path: Path) -> None:
    path, cache = write_jsonl(tmp_path / "a.jsonl", texts(80)), tmp_path / "cache"
    settings = {"source": "jsonl", "cache": str(cache), "held_out_share": 0.2, "sequence_tokens": 64, "rows": "pack"}

    def entries() -> list[str]:
        return sorted(entry.name for entry in (cache / "tokens").iterdir())

    first = source(path=str(path), **settings)
    assert len(entries()) == 1
    moved = path.rename(tmp_path / "b.jsonl")
    again = source(path=str(tmp_path / "*.jsonl"), **settings)
    assert len(entries()) == 1 and again.fingerprint == first.fingerprint, "known by content, not by name"
    assert row_texts(again.rows(range(9))) == row_texts(first.rows(range(9)))
    write_jsonl(moved, texts(81))
    assert source(path=str(moved), **settings).fingerprint != first.fingerprint
    assert len(entries()) == 2
    other = make(tmp_path / "prepared", texts(80), held_out_share=0.2)
    assert other.fingerprint == first.fingerprint, "and the tokens are those of `data prepare`"


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is not empty"):
        _prepare.prepare(
            [write_jsonl(tmp_path / "a.jsonl", texts(2))], tmp_path, Recipe(), processes=1, source={}, stamps=[]
        )

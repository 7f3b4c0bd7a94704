"""What a manifest tells besides the hashes, what stays out of it, and that older ones still load."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from pathlib import Path

from trainmaster.train.checkpoint.manifest import FileRecord
from trainmaster.train.checkpoint.provenance import redact
from trainmaster.train.checkpoint.write import write

from ..runs import RunHere, tiny


def test_a_manifest_tells_where_it_comes_from(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(tmp_path, tiny(steps=3, seed=7, eval_sequences=0))
    origin = ran.manifest(3)["origin"]
    assert origin["config"]["seed"] == 7
    assert origin["versions"]["python"] == platform.python_version()
    assert set(origin["versions"]) == {"trainmaster", "python", "torch", "cuda", "driver"}
    assert origin["ranks"] == [{"rank": 0, "node": 0, "host": socket.gethostname()}]
    assert origin["files"] == dict.fromkeys(ran.manifest(3)["files"], 0)
    assert origin["random"]["seed"] == 7
    assert origin["begun_at"] < ran.manifest(3)["saved_at"]
    assert ran.manifest(3)["feed"]["fingerprint"]  # of the data, which says so itself
    assert set(origin) == {"config", "git", "versions", "ranks", "files", "random", "begun_at"}


def test_no_credentials_of_a_url_get_into_it() -> None:
    config = {"a": ["https://me:secret@host:8443/x?sig=secret#f", 3], "b": {"c": "take s3://key:secret@bucket/p now"}}
    assert redact(config) == {"a": ["https://host:8443/x", 3], "b": {"c": "take s3://bucket/p now"}}


def test_a_manifest_from_before_these_fields_resumes(run_here: RunHere, tmp_path: Path) -> None:
    run_here(tmp_path, tiny(steps=3, eval_sequences=0))
    path = tmp_path / "checkpoints" / "step-00000003" / "manifest.json"
    plain = json.loads(path.read_bytes())
    for name in ("origin", "feed", "digest"):
        del plain[name]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**plain, "digest": digest}))
    again = run_here(tmp_path, tiny(steps=4, eval_sequences=0))
    assert again.named("TRAINING", "start")[-1]["data"]["resumed_from"] == 3


def test_the_hash_made_while_writing_is_that_of_the_file(tmp_path: Path) -> None:
    pieces: list[bytes | memoryview] = [
        b"head",
        memoryview(bytes(range(256)) * 70_000),
        b"",
        b"tail",
    ]  # over two slices
    record = write(tmp_path / "file", pieces)
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(pieces)
    assert record == FileRecord(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_every_nth_is_kept_for_ever_beside_the_newest(run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(steps=8, eval_sequences=0, checkpoint={"every_steps": 1, "keep": 1, "keep_every_steps": 3})
    assert run_here(tmp_path, config).checkpoints == ["step-00000003", "step-00000006", "step-00000008"]

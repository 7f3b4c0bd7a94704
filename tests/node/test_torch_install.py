"""What is known of the installed torch without importing it."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainmaster.node import torch_install


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> Path:
    """A torch with this version file."""
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(version)
    monkeypatch.setattr(torch_install, "find", lambda: folder / "torch")
    return folder / "torch"


CUDA = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(("answer", "count"), [("0 8", 8), ("0 0", 0), ("100 0", 0)])
def test_the_driver_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, count: int) -> None:
    install(tmp_path, monkeypatch, CUDA)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answer.encode()))
    assert torch_install.count_gpus() == count


def test_a_build_for_cpus_sees_no_gpu_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, CPU)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    assert torch_install.count_gpus() == 0


@pytest.mark.parametrize(
    ("version", "answer"),
    [(CUDA, "804 0"), (CUDA, ""), ("cuda = None\nhip = '6.4'\n", "0 8"), ("__version__ = '3'\n", "0 8")],
    ids=["driver of another version", "no driver library", "AMD", "another version file"],
)
def test_nothing_is_said_where_the_driver_cannot_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, answer: str
) -> None:
    install(tmp_path, monkeypatch, version)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answer.encode()))
    assert torch_install.count_gpus() is None


def test_bytecode_is_kept_where_the_image_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = install(tmp_path, monkeypatch, CUDA), tmp_path / "cache"
    environ = {"XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    kept = cache / "trainmaster" / "bytecode"
    assert torch_install.bytecode_variables(environ) == {
        "PYTHONPYCACHEPREFIX": str(kept),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    assert kept.stat().st_mode & 0o777 == 0o700
    assert torch_install.bytecode_variables({**environ, "PYTHONPYCACHEPREFIX": "/mine"}) == {}
    kept.chmod(0o777)  # anybody could put there what we execute
    assert torch_install.bytecode_variables(environ) == {}
    kept.chmod(0o700)
    cache.chmod(0o777)  # or another folder in its place
    assert torch_install.bytecode_variables(environ) == {}
    cache.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    assert torch_install.bytecode_variables({"XDG_CACHE_HOME": "cache"}) == {}
    beside = Path(importlib.util.cache_from_source(str(folder / "__init__.py")))
    beside.parent.mkdir()
    beside.touch()
    assert torch_install.bytecode_variables(environ) == {}


def test_bytecode_is_left_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, CUDA)
    (tmp_path / "file").touch()
    assert torch_install.bytecode_variables({"XDG_CACHE_HOME": str(tmp_path / "file")}) == {}

"""Every reader of YAML has the same limits: one clear error with file and line, exit code 2, no traceback."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster import targets
from trainmaster.cli.main import build
from trainmaster.control.notify import channels
from trainmaster.core.errors import UsageError
from trainmaster.targets.kubernetes.kubeconfig import load_access
from trainmaster.targets.kubernetes.settings import load_settings
from trainmaster.targets.pool import Pool
from trainmaster.targets.sagemaker.settings import load_settings as load_sagemaker
from trainmaster.targets.slurm.settings import read_settings
from trainmaster.train.__main__ import main as train_main

PACKAGE = Path(__file__).parents[2] / "src" / "trainmaster"

LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))])
# Each with what the error has to say of it, and the line if it has one.
DOCUMENTS = {
    "3,000 brackets": (b"a: 1\nb: " + b"[" * 3000, "nested deeper than 50 levels", 2),
    "a billion laughs": (LAUGHS.encode(), "aliases of aliases", 18),
    "an endless alias": (b"a: &x [*x]\n", "an alias inside of what it stands for", 1),
    "a key written twice": (b"a:\n  b: 1\n  b: 2\n", "written twice", 3),
    "a NUL byte": (b"a: 1\nb: \0\n", "special characters", 2),
    "Latin-1": ("a: 1\nb: Z\xfcrich\n".encode("latin-1"), "not UTF-8", 2),
    "UTF-16": ("a: 1\n".encode("utf-16"), "not UTF-8", 1),
    "10 MB": (b"a: " + b"x" * (10 << 20), "more than 1,048,576 bytes", None),
    "a day that is none": (b"a: 1\nb: 2026-02-31\n", "a value that is none", 2),
    "a number of 5,000 digits": (b"a: " + b"9" * 5000, "a value that is none", 1),
    "an object of Python": (b"a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor", 1),
}


def by_verb(*words: str) -> Callable[[Path], str]:
    """A verb of the command line; what it prints as its error."""

    def read(path: Path) -> str:
        given = [word.format(path=path) for word in words]
        result = CliRunner(env={"TRAINMASTER_HOME": str(path.parent)}).invoke(build(), given)
        if isinstance(result.exception, UsageError):  # printed by the boundary, which stands around the application
            return raised(result.exception)
        assert result.exit_code == 2, result.output
        return result.output

    return read


def by_call(call: Callable[[Path], object]) -> Callable[[Path], str]:
    """A function; its UsageError."""

    def read(path: Path) -> str:
        with pytest.raises(UsageError) as caught:
            call(path)
        return raised(caught.value)

    return read


def raised(error: UsageError) -> str:
    assert error.exit_code == 2
    return str(error)


def by_trainer(path: Path) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert train_main([str(path)], {}) == 2
    return said.getvalue()


def read_channels(path: Path) -> object:
    file = path.with_name(channels.FILE)
    path.rename(file)
    file.chmod(0o600)
    return channels.load(path.parent, {})


READERS = {
    "submit": by_verb("submit", "{path}", "--dry-run"),
    "train": by_verb("train", "{path}"),
    "plan": by_verb("plan", "{path}"),
    "drill": by_verb("drill", "{path}"),
    "data validate": by_verb("data", "validate", "corpus", "--model", "{path}"),
    "check --expect": by_verb("check", "--expect", "{path}"),
    "check --on ssh": by_verb("check", "--on", "ssh:{path}"),
    "cluster, a manifest": by_verb("cluster", "lint", "{path}"),
    "the trainer": by_trainer,
    "notify.yaml": by_call(read_channels),
    "hosts file": by_call(lambda path: targets.load(f"ssh:{path}").hosts()),  # type: ignore[attr-defined]
    "pool file": by_call(Pool),
    "Slurm": by_call(read_settings),
    "SageMaker": by_call(load_sagemaker),
    "Kubernetes": by_call(load_settings),
    "kubeconfig": by_call(lambda path: load_access(str(path), None)),
}


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_file_is_one_clear_error(tmp_path: Path, reader: str, document: str) -> None:
    raw, message, line = DOCUMENTS[document]
    path = tmp_path / "file.yaml"
    path.write_bytes(raw)
    text = " ".join(READERS[reader](path).split())
    assert "Traceback" not in text
    assert re.search(rf"(file|notify)\.yaml:{line}: " if line is not None else r"(file|notify)\.yaml: ", text), text
    if reader != "notify.yaml":  # its values are secrets: the line is all it says
        assert message in text


def test_the_secret_of_a_channel_is_in_no_error(tmp_path: Path) -> None:
    path = tmp_path / channels.FILE
    path.write_text("channels:\n  ops: {url: !!int slack://SECRET}\n")
    path.chmod(0o600)
    with pytest.raises(UsageError, match=r"notify\.yaml:2: not YAML") as caught:
        channels.load(tmp_path, {})
    assert "SECRET" not in str(caught.value)


def test_a_device_is_not_read_to_its_end() -> None:
    with pytest.raises(UsageError, match="more than"):
        load_sagemaker(Path("/dev/zero"))


def test_no_other_file_reads_yaml() -> None:
    uses = re.compile(r"\bsafe_load|\byaml\.(load|parse|compose|scan|\w*Loader)\b")
    found = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if uses.search(path.read_text())]
    assert found == ["documents/yaml_file.py"]

"""tools/install.sh: torch by pip first, the rest by uv, and by pip where uv fails; one set-up at a time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/install.sh"
REST = ["-c constraints.txt -e .[dev]", "--no-deps agent==1"]
PIP = "python -m pip install --disable-pip-version-check --no-compile"
WORDS = ("sh", str(SCRIPT), "odd env/bin", "dev", "agent==1")

pytestmark = pytest.mark.spawns


def put(folder: Path, name: str, code: str) -> None:
    """A program that writes down its words and ends with a code."""
    program = folder / "odd env/bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls"\n{code}\n')
    program.chmod(0o755)


def made(folder: Path) -> int:
    """How often an environment was made anew."""
    return sum(call.startswith("base -m venv --clear") for call in (folder / "calls").read_text().splitlines())


def install(
    folder: Path,
    *,
    uv: str | None,
    pip: str = "exit 0",
    own_pip: str = "echo version",
    environment: dict[str, str] | None = None,
) -> tuple[int, list[str]]:
    """The calls that install, with programs in place of pip and uv; `uv`, `pip`: what they end with."""
    put(folder, "pip", own_pip)
    put(folder, "base", f'[ "$2" = venv ] || exec "{sys.executable}" "$@"')
    # The version of pip is that of its program: the environment is whole.
    version = '[ "$*" = "-m pip --version" ] && echo version && exit 0'
    put(folder, "python", f'{version}\n[ "$1 $2" = "-m pip" ] || exit 0\n{pip}')
    if uv is not None:
        put(folder, "uv", uv)
    settings = {**os.environ, "PYTHON": str(folder / "odd env/bin/base"), **(environment or {})}
    code = subprocess.run(WORDS, cwd=folder, capture_output=True, check=False, env=settings).returncode
    calls = (folder / "calls").read_text().splitlines()
    return code, [call for call in calls if " install " in call]


def test_torch_is_there_before_anything_asks_for_it(tmp_path: Path) -> None:
    code, calls = install(tmp_path, uv="exit 0")
    assert (code, calls[2:]) == (0, [f"uv pip install --quiet --python odd env/bin/python {words}" for words in REST])
    assert calls[:2] == [f"{PIP} -c constraints.txt torch numpy", f"{PIP} --quiet -c constraints.txt uv"]


@pytest.mark.parametrize("uv", [None, "exit 2"], ids=["missing", "fails"])
def test_without_uv_pip_installs_everything(tmp_path: Path, uv: str | None) -> None:
    code, calls = install(tmp_path, uv=uv)
    by_pip = [call for call in calls[2:] if call.startswith("python")]
    assert (code, by_pip) == (0, [f"{PIP} --quiet {words}" for words in REST])


def test_where_pip_fails_nothing_says_that_it_is_installed(tmp_path: Path) -> None:
    assert install(tmp_path, uv="exit 2", pip='case "$*" in *torch*) exit 0;; *) exit 1;; esac')[0] != 0
    assert not (tmp_path / "odd env/.place").exists()


def test_what_was_killed_half_way_is_begun_anew(tmp_path: Path) -> None:
    assert install(tmp_path, uv="kill -9 $PPID")[0] != 0
    assert (tmp_path / "odd env/.installing").exists()
    assert install(tmp_path, uv="exit 0")[0] == 0
    assert made(tmp_path) == 1 and not (tmp_path / "odd env/.installing").exists()
    assert install(tmp_path, uv="exit 0")[0] == 0 and made(tmp_path) == 1, "it is whole now"


@pytest.mark.parametrize("pip", ["exit 1", "echo version in another place"], ids=["not there yet", "moved"])
def test_an_environment_without_its_own_pip_is_begun_anew(tmp_path: Path, pip: str) -> None:
    """Killed while it was made; a clone that was moved or copied, whose programs belong to the old place."""
    assert install(tmp_path, uv="exit 0")[0] == 0 and made(tmp_path) == 0
    assert install(tmp_path, uv="exit 0", own_pip=pip)[0] == 0 and made(tmp_path) == 1


def test_a_set_up_that_failed_says_what_to_do(tmp_path: Path) -> None:
    put(tmp_path, "pip", "echo version")
    put(tmp_path, "python", '[ "$*" = "-m pip --version" ] && echo version && exit 0\n[ "$1" != -m ]')
    failed = subprocess.run(WORDS, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert all(word in failed.stderr for word in ("run make again", "PIP_INDEX_URL", "TMPDIR"))


def test_settings_of_the_shell_send_no_package_elsewhere(tmp_path: Path) -> None:
    names = "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_DRY_RUN", "PIP_REQUIRE_HASHES", "PYTHONPATH"
    elsewhere = {**dict.fromkeys(names, "/elsewhere"), "PYTHONHOME": "/elsewhere", "PIP_USER": "1"}
    write = f"env | sort > '{tmp_path}/environment'"
    code, calls = install(tmp_path, uv="exit 0", pip=write, environment=elsewhere)
    seen = (tmp_path / "environment").read_text()
    assert code == 0 and len(calls) == 4 and "PIP_USER=0\n" in seen and "=/elsewhere\n" not in seen


def test_a_second_set_up_waits_for_the_first(tmp_path: Path) -> None:
    put(tmp_path, "python", "exit 0")
    with (tmp_path / "odd env.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        environment = {**os.environ, "PIP_NO_INDEX": "1", "PYTHON": sys.executable}
        second = subprocess.Popen(
            WORDS, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert second.stdout is not None
        assert b"waiting for another make" in second.stdout.readline()
        assert not (tmp_path / "calls").exists(), "it looks at nothing before it is alone"
    second.communicate(timeout=60)
    assert (tmp_path / "calls").exists()


def test_an_older_python_is_named_with_what_to_do(tmp_path: Path) -> None:
    """The check itself, with a bound that no Python meets: there is no older one to try it with."""
    script = tmp_path / "install.sh"
    script.write_text(SCRIPT.read_text().replace("(3, 11)", "(99, 0)"))
    words = ["sh", str(script), "odd env/bin", "dev"]
    refused = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "make PYTHON=python3.12" in refused.stderr and "make again" not in refused.stderr
    assert not list(tmp_path.glob("odd env*"))

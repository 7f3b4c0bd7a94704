"""The package that nodes get: no file of the control half, and all that is started on a node runs from it alone."""

from __future__ import annotations

import gzip
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trainmaster.remote import bootstrap, package

SOURCE = Path(package.__file__).parents[1]
NODE_HALF = {"core", "node", "checks", "bench", "models", "datasets", "drill", "train", "storage", "agent", "remote"}
IN_IMAGE = {"trainmaster.sagemaker_job"}  # the whole package is installed in the image that starts it
# A module in a command line, as a word or in a program that is sent as text.
STARTED = re.compile(r"""(?:"-m",\s*|\brun_module\()["'](trainmaster\.[a-z_.]+)["']""")

# Under -I -S nothing else is on the path: no environment, no site-packages, no installed trainmaster.
IMPORT = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


@pytest.fixture(scope="module")
def node_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    unpack(package.pack(), folder)
    return folder


def unpack(made: package.Package, folder: Path) -> None:
    zipfile.ZipFile(io.BytesIO(gzip.decompress(made.data))).extractall(folder)


def test_it_fits_into_a_config_map_with_room_to_grow() -> None:
    assert len(package.pack().data) < 900 << 10, "a ConfigMap holds 1 MiB"


def test_no_file_of_the_control_half_is_sent(node_half: Path) -> None:
    entries = {path.name for path in (node_half / "trainmaster").iterdir()}
    assert entries == NODE_HALF | {"__init__.py"}


def test_a_shared_folder_gets_the_same_files(node_half: Path, tmp_path: Path) -> None:
    package.install(tmp_path / "shared")
    trees = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (node_half, tmp_path / "shared")
    ]
    assert trees[0] == trees[1]
    package.install(tmp_path / "shared")  # it is there
    assert list(tmp_path.iterdir()) == [tmp_path / "shared"]


def test_a_package_that_another_machine_has_cached_meanwhile_stays_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines with one home folder begin together: moving the first one's package aside would end its server."""
    made = package.pack()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "trainmaster" / made.digest

    def receive(*_: object) -> bytes:
        unpack(made, cache)
        first.append(cache.stat().st_ino)
        return made.data

    first: list[int] = []
    monkeypatch.setattr(bootstrap, "_receive", receive)
    order = {"digest": made.digest, "size": len(made.data), "nonce": "other"}
    (tmp_path / "work").mkdir()
    bootstrap._node_half(order, tmp_path / "work", 1.0)
    assert [cache.stat().st_ino] == first and list(cache.parent.iterdir()) == [cache]


def test_every_module_that_is_started_by_name_is_sent(node_half: Path) -> None:
    started = {name for path in SOURCE.rglob("*.py") for name in STARTED.findall(path.read_text())}
    assert {"trainmaster.remote.node_server", "trainmaster.remote.bootstrap", "trainmaster.agent.pod"} <= started
    for name in started - IN_IMAGE:
        place = node_half.joinpath(*name.split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), name


def test_the_node_half_needs_only_the_standard_library_and_itself(node_half: Path) -> None:
    """But for the folders that compute: their programs need torch, which a training machine has."""
    root = node_half / "trainmaster"
    modules = [
        ".".join(path.relative_to(node_half).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("core", "node", "checks", "agent", "remote", "storage")
        for path in sorted((root / folder).rglob("*.py"))
    ]
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT, str(node_half), *modules],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")

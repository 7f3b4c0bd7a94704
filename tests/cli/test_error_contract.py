"""Contract of every verb: an output that cannot be written, a missing extra, a bad encoding and a full disk end with
one line and the right exit code, never with a traceback."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cli.error_cases import BASE, CASES
from cli.full_disk import NO_MOUNT, fill_disk
from fork_server import ForkServer
from trainmaster.cli._views.boundary import EXTRAS, VERDICT_VERBS
from trainmaster.cli.main import verbs

ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(ROOT / "src")
_WORD = re.compile(r"\{(\w+)\}")


def test_every_verb_has_its_cases() -> None:
    assert set(verbs()) == set(CASES) == set(BASE), "add the new verb to both tables of this file"
    assert all(set(cases) == {"output", "encoding", "disk"} for cases in CASES.values())


def test_each_optional_package_is_mapped_to_an_extra_that_installs_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        names = " ".join(extras[extra]).replace("-", "_").lower()
        assert package in names or package in ("starlette", "botocore"), f"{extra} does not install {package}"


@pytest.mark.matrix(one_in=6)
@pytest.mark.parametrize("verb", sorted(CASES))
def test_an_output_that_cannot_be_written(
    verb: str, places: dict[str, str], programs: ForkServer, tmp_path: Path
) -> None:
    with open("/dev/null", "rb") as unwritable:  # a stream that is open for reading alone  # noqa: PTH123
        check(
            run(CASES[verb]["output"], places, tmp_path, stream=unwritable.fileno(), programs=programs),
            verb,
            says=r"Not a directory|File exists|cannot be made|cannot be (written|read): (Not a|Bad file)",
        )


@pytest.mark.parametrize(
    ("words", "code"), [("target list >", 0), ("drill --strike list >", 3), ("drill --strike list --json >", 3)]
)
def test_an_output_that_was_closed_ends_a_verb_quietly(
    words: str, code: int, places: dict[str, str], programs: ForkServer, tmp_path: Path
) -> None:
    """`| head -1`. rich ended every verb with 1, which is the FAIL of a drill."""
    closed, stream = os.pipe()
    os.close(closed)
    done = run(words, places, tmp_path, stream=stream, programs=programs)
    os.close(stream)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.matrix(one_in=6)
@pytest.mark.parametrize("verb", sorted(verb for verb, cases in CASES.items() if cases["encoding"]))
def test_a_bad_encoding(verb: str, places: dict[str, str], programs: ForkServer, tmp_path: Path) -> None:
    env = {"TRAINMASTER_TOKEN_FILE": places["bad"]}
    done = run(CASES[verb]["encoding"], places, tmp_path, env=env, programs=programs)
    if verb == "bandwidth":  # its input is the output of another program, in any encoding: INCOMPLETE, no error
        assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
        return
    check(done, verb, says=r"(?i)utf-8|not a database|not pem")


@pytest.mark.matrix(one_in=6)
@pytest.mark.parametrize("verb", sorted(CASES))
def test_a_full_disk(verb: str, places: dict[str, str], programs: ForkServer, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    prepare = (f"{fill_disk.__module__}:{fill_disk.__name__}", str(full))
    with open("/dev/full", "wb") as stream:  # noqa: PTH123
        done = run(CASES[verb]["disk"], places, tmp_path, stream=stream.fileno(), programs=programs, prepare=prepare)
    if done.returncode == NO_MOUNT:
        pytest.skip(f"no mount of our own here: {done.stderr.strip()[:100]}")
    check(done, verb, says=r"No space left|disk is full|disk I/O error|unable to open database")


@pytest.mark.matrix(one_in=6)
@pytest.mark.parametrize("verb", sorted(BASE))
def test_a_base_install(verb: str, places: dict[str, str], base: Path, tmp_path: Path) -> None:
    words, extra = BASE[verb]
    done = run(words, places, tmp_path, python=base)
    if extra is None:
        assert done.returncode in (0, 1, 3), done.stderr
        assert "Traceback" not in done.stderr and not error_lines(done)
    else:
        check(done, verb, says=rf"pip install (-e )?'.*\[{extra}\]'")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("garbage", "not a URL"),
        ("mysql://u:hunter2@host/n", "postgresql+psycopg or sqlite"),
        ("postgresql://u:hunter2@127.0.0.1:1/n", "cannot be opened"),
        ("sqlite:////proc/none/t.db", "cannot be opened"),
    ],
)
def test_a_database_that_cannot_be_used(
    url: str, says: str, places: dict[str, str], programs: ForkServer, tmp_path: Path
) -> None:
    done = run("jobs", places, tmp_path, env={"TRAINMASTER_DATABASE": url}, programs=programs)
    check(done, "jobs", says=re.escape(says))
    assert "hunter2" not in done.stderr
    assert not (tmp_path / "garbage").exists()


def test_postgres_without_its_driver_names_the_extra(places: dict[str, str], base: Path, tmp_path: Path) -> None:
    for name in ("sqlalchemy", "alembic", "mako", "markupsafe", "greenlet"):
        link(name, base.parent.parent / "lib")
    done = run("jobs", places, tmp_path, python=base, env={"TRAINMASTER_DATABASE": "postgresql+psycopg://u@h/n"})
    check(done, "jobs", says=r"pip install (-e )?'.*\[postgres\]'")


@pytest.mark.parametrize("names", [("missing", "missing"), ("spec", "spec")])
def test_tls_files_are_read_before_an_address_is_printed(
    names: tuple[str, str], places: dict[str, str], programs: ForkServer, tmp_path: Path
) -> None:
    cert, key = (places.get(name, str(tmp_path / name)) for name in names)
    done = run(f"serve --port 0 --tls-cert {cert} --tls-key {key}", places, tmp_path, programs=programs)
    check(done, "serve", says="--tls-cert|cannot be read")
    assert "Trainmaster at" not in done.stderr


def check(done: subprocess.CompletedProcess[str], verb: str, *, says: str) -> None:
    output = f"{done.args}\nexit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert "Traceback" not in done.stderr + done.stdout, output
    (line,) = error_lines(done) or [output]
    assert re.search(says, line), output
    assert done.returncode in ((2, 3) if verb in VERDICT_VERBS else (2,)), output


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error ")]


def run(
    words: str,
    places: dict[str, str],
    folder: Path,
    *,
    stream: int | None = None,
    python: Path | None = None,
    env: dict[str, str] | None = None,
    programs: ForkServer | None = None,
    prepare: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    here = {**places, "full": str(folder / "full"), "free": str(folder)}
    filled = [_WORD.sub(lambda match: here[match[1]], word) for word in words.split()]
    to_stream = filled[-1:] == [">"]
    arguments = filled[: -1 if to_stream else None]
    around_env = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "NO_COLOR": "1", "COLUMNS": "400",
        **({} if python else {"PYTHONPATH": SOURCE}), **(env or {}),
    }  # fmt: skip
    out = stream if to_stream else None
    if programs is not None:
        return programs.run("trainmaster", *arguments, env=around_env, cwd=folder, stdout=out, prepare=prepare)
    command = [str(python or sys.executable), "-m", "trainmaster", *arguments]
    return subprocess.run(
        command, check=False, env=around_env, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", timeout=150,
    )  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Inputs of the cases, good and bad, by name."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "file").write_text("a file, not a folder\n")
    (folder / "bad.yaml").write_bytes(b"name: \xff\xfe caf\xe9\n")
    (folder / "bad.yaml").chmod(0o600)
    (folder / "job.yaml").write_text("name: a\ncommand: [sleep, '1']\n")
    (folder / "train.yaml").write_text("device: cpu\nsteps: 40\n")
    (folder / "corpus.txt").write_text("one two three\n" * 2000)
    (folder / "nccl.log").write_text("nothing was measured\n")
    made_here = ("bad_home", "bad_bundle", "bad_model", "events", "out_home")
    for name in made_here:
        (folder / name).mkdir()
    (folder / "bad_home/trainmaster.db").write_bytes(b"\xff\xfe not a database" * 100)
    (folder / "bad_bundle/health.json").write_bytes(b'{"asked": ["\xff\xfe"]}')
    (folder / "bad_model/config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    (folder / "events/events.jsonl").write_text(
        '{"v":1,"ts":"2026-01-01T00:00:00Z","phase":"TRAINING","event":"start"}\n'
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE, "HOME": str(folder)}
    made = [sys.executable, "-m", "trainmaster", "check", "--only", "kernel", "--out", str(folder / "bundle")]
    subprocess.run(made, check=True, env=env, capture_output=True)
    (node,) = json.loads((folder / "bundle/health.json").read_text())["asked"]
    drained = {"at": "2026-01-01T00:00:00+00:00", "did": "drain", "node": node, "checks": ["kernel"]}
    (folder / "out_home/remedies.jsonl").write_text(json.dumps(drained) + "\n")
    return {
        "blocked": str(folder / "file/below"), "bad": str(folder / "bad.yaml"), "spec": str(folder / "job.yaml"),
        "config": str(folder / "train.yaml"), "corpus": str(folder / "corpus.txt"), "log": str(folder / "nccl.log"),
        "checkpoint": str(save_checkpoint(folder)), "results": str(save_results(folder / "results.json")),
        **{name: str(folder / name) for name in (*made_here, "bundle")},
    }  # fmt: skip


def save_results(path: Path) -> Path:
    """As much of an acceptance run's results.json as a golden run is made of."""
    options = {
        "model": "resnet18", "data_mode": "synthetic", "image_size": None, "batch_size": 4, "accumulate": 1,
        "num_classes": 10, "layers": 12, "width": 768, "heads": 12, "sequence": 512,
    }  # fmt: skip
    times = {"p50": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1}
    document = {
        "v": 1, "overall": "PASS", "finished_at": "2026-01-01T00:00:00+00:00", "options": options, "device": "cpu",
        "checks": [], "precision": "fp32", "world_size": 1, "nodes": 1, "backend": "gloo",
        "throughput_samples_per_second": 40.0, "scaling_efficiency": None,
        "ranks": [{"rank": 0, "gpu": None, "step_s": times, "alone_s": times}],
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


def save_checkpoint(folder: Path) -> Path:
    import torch

    from trainmaster.core.config.train import ModelConfig
    from trainmaster.models.family import weight_shapes
    from trainmaster.train.checkpoint.weights import save_weights

    config = ModelConfig()
    shapes = weight_shapes(config)
    return save_weights(folder / "checkpoint", config, lambda name: torch.ones(shapes[name]))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of an environment that holds what `pip install trainmaster` brings, and no extra."""
    folder = tmp_path_factory.mktemp("base")
    venv.EnvBuilder(symlinks=True).create(folder)
    for name in closure(["typer", "rich", "pyyaml"]):
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                link(top.removesuffix(".py"), folder / "lib")
    (site(folder / "lib") / "source.pth").write_text(SOURCE + "\n")
    yield folder / "bin/python"


def closure(names: list[str]) -> set[str]:
    """These distributions and all that they require, without their extras."""
    found: set[str] = set()
    while names:
        name = re.split(r"[^A-Za-z0-9._-]", names.pop())[0].lower()
        if name in found:
            continue
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found.add(name)
        names += [line for line in wanted if "extra ==" not in line]
    return found


def link(name: str, lib: Path) -> None:
    """Make an installed package or module visible in another environment."""
    for entry in (Path(word) for word in sys.path if word.endswith("-packages")):
        for path in (entry / name, entry / f"{name}.py"):
            made = site(lib) / path.name
            if path.exists() and not made.exists():
                made.symlink_to(path)
                return


def site(lib: Path) -> Path:
    return next(lib.glob("python3*/site-packages"))

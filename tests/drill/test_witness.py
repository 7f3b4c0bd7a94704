"""The witness that is put into programs: what it hears of saves, and what an error of its own costs."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainmaster.core.plan import Plan
from trainmaster.core.results import Verdict
from trainmaster.core.spec import JobSpec
from trainmaster.drill import attempt as engine
from trainmaster.drill import plan, verdict, witness_log
from trainmaster.drill.record import Setup
from trainmaster.drill.run import CommandDrill
from trainmaster.drill.witness_log import FOLDER_VARIABLE

from .test_drill_parts import SHAPE, attempt, lines_of

PARTS = ("beside", "digests", "disk", "process", "saves", "steps", "strike", "turns", "witness")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules that are put into programs, at work in this process without their hooks."""
    monkeypatch.syspath_prepend(str(Path(plan.__file__).parent / "inject"))
    for name in PARTS:
        monkeypatch.delitem(sys.modules, f"trainmaster_{name}", raising=False)
    found = SimpleNamespace(**{name: importlib.import_module(f"trainmaster_{name}") for name in PARTS})
    found.process.start(str(tmp_path))
    yield found
    if found.process.witness.file is not None:
        found.process.witness.file.close()
    for name in PARTS:
        del sys.modules[f"trainmaster_{name}"]


def test_a_save_into_memory_is_one_when_it_went_into_a_file(parts: SimpleNamespace, tmp_path: Path) -> None:
    """So Lightning saves: torch.save into memory, a temporary file, a rename."""
    aside, whole = str(tmp_path / "tmp1"), str(tmp_path / "step=5.ckpt")
    parts.saves.on_audit("open", (aside, "wb", os.O_WRONLY))
    assert parts.process.witness.written is None, "nothing was saved into memory"
    parts.saves.on_save(io.BytesIO(b"x" * 100))
    for path, flags in ((str(tmp_path / "train.log"), os.O_WRONLY), (aside, os.O_RDONLY), (7, os.O_WRONLY)):
        parts.saves.on_audit("open", (path, "", flags))
    assert parts.process.witness.written is None
    parts.saves.on_audit("open", (aside, "wb", os.O_WRONLY))
    parts.saves.on_audit("os.rename", (aside, whole, -1, -1))
    assert parts.process.witness.written == whole
    parts.saves.on_save(tmp_path / "model.pt")
    (line,) = [json.loads(raw) for raw in (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()]
    assert (line["k"], line["path"], line["behind"]) == ("save", str(tmp_path / "model.pt"), False)
    assert parts.process.witness.written is None


def test_a_save_in_a_thread_is_of_the_step_at_which_it_began(parts: SimpleNamespace, tmp_path: Path) -> None:
    """Training goes on beside it: it was taken for one of the step at which it ended."""
    witness = parts.process.witness

    def save() -> None:
        def write(*_: object) -> None:
            witness.steps = 13

        witness.steps = 10
        parts.saves.call_save(write, tmp_path / "model.pt", {})

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    (line,) = [json.loads(raw) for raw in (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()]
    assert (line["k"], line["n"], line["behind"]) == ("save", 10, True)


def test_saves_of_two_threads_are_each_of_the_step_at_which_they_began(parts: SimpleNamespace, tmp_path: Path) -> None:
    """The second one began while the first was written, and gave it its own step."""
    witness = parts.process.witness

    def save(number: int, inner: int | None) -> None:
        def write(*_: object) -> None:
            if inner:
                other = threading.Thread(target=save, args=(inner, None))
                other.start()
                other.join()
                witness.steps = inner + 1

        witness.steps = number
        parts.saves.call_save(write, tmp_path / "model.pt", {})

    thread = threading.Thread(target=save, args=(10, 13))
    thread.start()
    thread.join()
    lines = [json.loads(raw) for raw in (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()]
    assert [line["n"] for line in lines] == [13, 10]


@pytest.mark.parametrize("temporary", [False, True])
def test_a_kill_while_memory_is_written_leaves_half_of_it(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: bool
) -> None:
    """Of a temporary file outside of the drill, which is moved to its place when it is whole, nothing is touched."""
    if temporary:
        (tmp_path / "drill/struck/witness").mkdir(parents=True)
        monkeypatch.setattr(parts.process.witness, "folder", str(tmp_path / "drill/struck/witness"))

    def kill(_: int, number: int) -> None:
        raise SystemExit(number)

    monkeypatch.setattr(os, "kill", kill)
    parts.process.witness.strike = {"when": "save", "after": 0, "rank": None, "do": "kill", "look": 6}
    parts.saves.on_save(io.BytesIO(b"x" * 100))
    with pytest.raises(SystemExit, match=str(int(signal.SIGKILL))):
        parts.saves.on_audit("open", (str(tmp_path / "a.ckpt"), "wb", os.O_WRONLY))
    assert temporary != (tmp_path / "a.ckpt").exists()
    assert temporary or (tmp_path / "a.ckpt").read_bytes() == b"x" * 50


def test_a_save_of_torchs_distributed_checkpoint_is_one_to_its_file(parts: SimpleNamespace, tmp_path: Path) -> None:
    """It puts the open file into a writer without a name; a kill during a save never came."""

    class NotClosed(io.IOBase):
        def __init__(self, raw: io.IOBase) -> None:
            self.raw = raw

    with (tmp_path / "__0_0.distcp").open("wb") as file:
        parts.saves.on_save(NotClosed(file))
    (line,) = [json.loads(raw) for raw in (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()]
    assert (line["k"], line["path"]) == ("save", str(tmp_path / "__0_0.distcp"))


def test_a_program_is_ended_before_it_saves_over_the_users_own_file(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(_: int, number: int) -> None:
        raise SystemExit(number)

    monkeypatch.setattr(os, "kill", kill)
    mine = tmp_path / "drill/reference"
    monkeypatch.setattr(parts.process.witness, "folder", str(mine / "attempt-1-witness"))
    (mine / "attempt-1-witness").mkdir(parents=True)
    (mine / "work").symlink_to("/nowhere")
    for place in (mine / "checkpoints/a.pt", "/tmp/a.pt", "/dev/shm/a.pt", io.BytesIO()):
        parts.saves.before_save(place)
    assert witness_log.read_outside(mine / "attempt-1-witness") is None
    with pytest.raises(SystemExit, match=str(int(signal.SIGKILL))):
        parts.saves.before_save(str(mine / "work/a.pt"))
    assert witness_log.read_outside(mine / "attempt-1-witness") == "/nowhere/a.pt"


def test_a_drill_ends_with_the_first_program_that_would_save_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(job: Plan, **_: object) -> dict[str, object]:
        lines = Path(job.spec.env[FOLDER_VARIABLE]) / "7.jsonl"
        lines.write_text(json.dumps({"k": "outside", "n": 5, "r": 0, "t": 1.0, "path": "/scratch/a.pt"}))
        return {"exit_codes": {"0": -9}}

    monkeypatch.setattr(engine, "run", run)
    setup = Setup(spec=JobSpec(name="x", command=("true",)))
    with pytest.raises(engine.DrillFailed, match=r"saves to /scratch/a.pt, .* ended before it wrote there"):
        CommandDrill(setup, tmp_path / "out").run()


def test_a_save_through_a_link_is_one_to_where_it_points_and_is_not_truncated_there(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, mine = tmp_path / "own", tmp_path / "drill/struck"
    (mine / "witness").mkdir(parents=True)
    own.mkdir()
    (mine / "ckpt").symlink_to(own)
    (own / "a.pt").write_bytes(b"x" * 100)
    monkeypatch.setattr(parts.process.witness, "folder", str(mine / "witness"))
    parts.process.witness.strike = {"when": "save", "after": 0, "rank": None, "do": "hold", "look": 6}
    parts.saves.on_save(mine / "ckpt/a.pt")
    assert (own / "a.pt").read_bytes() == b"x" * 100
    (line,) = [json.loads(raw) for raw in (mine / f"witness/{os.getpid()}.jsonl").read_text().splitlines()]
    assert (line["k"], line["path"]) == ("save", str(own / "a.pt"))
    saves = (witness_log.Save(after=1, at=1.0, path=line["path"]),)
    run = attempt(*lines_of(1, 3))
    found = verdict.unfit(replace(run, lives=(replace(run.lives[0], saves=saves),)), tmp_path / "drill")
    assert found is not None and f"it saves to {own / 'a.pt'}" in found.reason


def test_an_error_of_the_witness_costs_a_line_and_the_judgement_not_the_program(
    parts: SimpleNamespace, tmp_path: Path
) -> None:
    assert parts.process.quietly(lambda: 1 // 0) is None
    step = {"k": "step", "o": 0, "r": 0, "w": 1, "lr": [0.1], "p": "p", "s": "s", "g": {}, "b": []}
    lines = [json.dumps({**step, "n": number, "t": float(number)}) for number in (1, 2, 4)]
    (tmp_path / "7.jsonl").write_text("\n".join(lines))
    (holed,) = witness_log.read(tmp_path)
    assert holed.missed == 1
    run = attempt(*lines_of(1, 40))
    findings = verdict.judge_all(
        run, replace(run, lives=(holed,)), SHAPE, struck=[], attempts=[], resumes=[], planned=[], reached=None
    )
    assert [(name, finding.verdict) for name, finding in findings] == [("witness", Verdict.ERROR)]


@pytest.mark.slow  # it imports torch
def test_statistics_of_batch_norm_are_in_the_line_of_a_step(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    parts.witness._watch_modules(torch.nn.modules.module)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        torch.nn.BatchNorm1d(3)  # not trained
    finally:
        hooks.clear()
        hooks.update(before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for changed in (False, False, True):
        if changed:
            model[1].running_mean += 1
        parts.steps.note_step(optimizer)
    bare = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.0)
    del optimizer  # the one that counts is gone
    parts.steps.note_step(bare)
    (one,) = witness_log.read(tmp_path)
    first, second, third, without = (line.buffers for line in one.lines)
    assert first == second != third
    assert without == "" and {line.weights for line in one.lines[:3]} == {one.lines[0].weights}


@pytest.mark.slow  # it imports torch
@pytest.mark.parametrize("gone", ["compiler", "compiler.is_compiling"])
def test_steps_are_seen_with_a_torch_that_has_no_word_for_compiling(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """torch 2.0: every step was left out, without a word."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    monkeypatch.delattr(f"torch.{gone}")
    parts.steps.on_step(optimizer, (), {})
    monkeypatch.undo()
    (one,) = witness_log.read(tmp_path)
    assert len(one.lines) == 1


@pytest.mark.slow  # it imports torch
def test_a_step_that_only_makes_the_optimizers_state_is_none_of_the_run(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch's distributed checkpoint loads: such a resume was taken for a start at step 0."""
    torch = pytest.importorskip("torch")
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")
    monkeypatch.setattr(states, "_init_optim_state", states._init_optim_state)
    parts.witness._watch_states(states)
    optimizers = importlib.import_module("torch.optim.optimizer")
    hook = optimizers.register_optimizer_step_pre_hook(parts.steps.on_step)
    try:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        states.get_state_dict(model, optimizer)
        assert optimizer.state and not list(tmp_path.glob("*.jsonl"))
        optimizer.step()
    finally:
        hook.remove()
    (one,) = witness_log.read(tmp_path)
    assert len(one.lines) == 1


# As a script saves that renames: into memory, a file beside it, its final name. The last one comes after the last step.
RENAMES = """
import io, os, sys, tempfile, trainmaster_process, trainmaster_saves as saves
witness = trainmaster_process.witness
for step in (1, 2):
    witness.steps = step
    if sys.argv[1] == "memory":
        saves.on_save(io.BytesIO(b"x" * 100))
        with open("part", "wb") as file:
            file.write(b"x" * 100)
        os.replace("part", f"step-{step}.pt")
        if witness.written and step == 1:  # as the next step would
            saves.note_save(witness, witness.written, 0)
    else:
        handle, name = tempfile.mkstemp(dir=".")
        with os.fdopen(handle, "wb") as file:
            file.write(b"x" * 100)
            saves.on_save(file)
        os.replace(name, f"step-{step}.pt")
"""


@pytest.mark.spawns
@pytest.mark.parametrize("way", ["memory", "number"])
def test_the_last_save_of_a_script_that_renames_is_counted(way: str, tmp_path: Path) -> None:
    folder, work = tmp_path / "struck/attempt-1-witness", tmp_path / "struck/work"
    folder.mkdir(parents=True)
    work.mkdir()
    env = {
        "PYTHONPATH": str(Path(plan.__file__).parent / "inject"),
        FOLDER_VARIABLE: str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    subprocess.run([sys.executable, "-c", RENAMES, way], env=env, cwd=work, check=True)
    (lines,) = folder.glob("*.jsonl")
    saves = [(item["n"], item["path"]) for item in map(json.loads, lines.read_text().splitlines())]
    assert [step for step, _ in saves] == [1, 2]
    if way == "memory":
        assert [path for _, path in saves] == [str(work / f"step-{step}.pt") for step in (1, 2)]

"""State beside the optimizer: a GradScaler, averaged weights, and what the next checkpoints hold."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainmaster.cli._views import command_proof, drill_report
from trainmaster.core.results import Finding, Overall, Verdict
from trainmaster.drill import beside, judge, plan, verdict, witness_log
from trainmaster.drill.lives import Resume
from trainmaster.drill.record import Struck
from trainmaster.drill.witness_log import Line

from .test_drill_parts import attempt, lines_of, proof_of
from .test_judge import GROUND, line, lines_from, resumes
from .test_witness import parts

__all__ = ["parts"]


def held(found: list[Resume], **changes: object) -> list[Resume]:
    """Resumes of a run that had this in its steps 11 to 16."""
    had: dict[int, Line] = {step: replace(line(step), **changes) for step in range(11, 17)}  # type: ignore[arg-type]
    return [replace(one, own=had, reference=had) for one in found]


SCALES = ((1024.0, 7.0),)


@pytest.mark.parametrize(
    ("got", "outcome", "words"),
    [
        (SCALES, Verdict.PASS, "as they were saved"),
        (((65536.0, 0.0),), Verdict.FAIL, "the scale of the GradScaler is 65536 instead of 1024 in step 11"),
        (((1024.0, 0.0),), Verdict.FAIL, "counts 0 steps without an infinite gradient instead of 7"),
        ((), Verdict.FAIL, "there is no GradScaler in step 11"),
    ],
)
def test_a_grad_scaler_goes_on_with_its_scale(got: Any, outcome: Verdict, words: str) -> None:
    finding = beside.scaler(held(resumes(*lines_from(10, scales=got)), scales=SCALES), GROUND)
    assert finding is not None and (finding.verdict, words in finding.reason) == (outcome, True), finding.reason
    assert beside.scaler(resumes(*lines_from(10)), GROUND) is None


@pytest.mark.parametrize(
    ("got", "had", "outcome"),
    [
        (((512.0, 0.0),), SCALES, Verdict.PASS),  # an infinite gradient after the resume, which the run had not
        (((1024.0, 7.0),), ((512.0, 0.0),), Verdict.PASS),  # the other way round
        (((512.0, 7.0),), SCALES, Verdict.FAIL),
        (((1024.0, 0.0),), SCALES, Verdict.FAIL),
        (((65536.0, 0.0),), SCALES, Verdict.FAIL),
        ((), SCALES, Verdict.FAIL),
    ],
)
def test_an_infinite_gradient_by_chance_is_no_lost_scale(got: Any, had: Any, outcome: Verdict) -> None:
    found = held(resumes(*lines_from(10, scales=got)), scales=had)
    right = held(resumes(*lines_from(10, scales=SCALES)), scales=SCALES)
    chance = replace(GROUND, repeatable=False)
    finding = beside.scaler([*right, *found], chance)
    assert finding is not None and finding.verdict is outcome, finding
    alone, exact = beside.scaler(found, chance), beside.scaler(found, GROUND)
    assert exact is not None and exact.verdict is Verdict.FAIL, "of a repeatable run it is lost"
    assert alone is not None and alone.verdict is (Verdict.ERROR if outcome is Verdict.PASS else Verdict.FAIL)


@pytest.mark.parametrize(
    ("got", "outcome", "words"),
    [
        (((10, "a"),), Verdict.PASS, "bit-equal"),
        (((0, "x"),), Verdict.FAIL, "those that the run had in step 11, 0 averaged instead of 10"),
        (((10, "x"),), Verdict.FAIL, "those that the run had in step 11"),
        ((), Verdict.FAIL, "none averaged instead of 10"),
    ],
)
def test_averaged_weights_are_those_that_were_saved(got: Any, outcome: Verdict, words: str) -> None:
    finding = beside.averages(held(resumes(*lines_from(10, averages=got)), averages=((10, "a"),)))
    assert finding is not None and (finding.verdict, words in finding.reason) == (outcome, True), finding.reason
    assert beside.averages(resumes(*lines_from(10))) is None


def test_what_the_run_was_not_seen_to_hold_is_not_called_right() -> None:
    after = lines_from(10, scales=SCALES, averages=((10, "a"),), settings=DECAY, buffers="b")
    unseen = [replace(one, own={}, clean=False) for one in resumes(*after)]
    known = held(unseen, scales=SCALES, averages=((10, "a"),), settings=DECAY, buffers="b")
    ground = replace(GROUND, repeatable=False)
    claims: list[Callable[[list[Resume]], Finding | None]] = [
        lambda found: beside.scaler(found, ground),
        beside.averages,
        lambda found: beside.hyperparameters(found, ground),
        judge.weights,
        judge.optimizer,
        lambda found: judge.random_state(found, ground),
        lambda found: judge.buffers(found, replace(ground, buffers=True)),
    ]
    for claim in claims:
        alone, beside_one = claim(unseen), claim([*unseen, *known])
        assert alone is not None and (alone.verdict, "not judged" in alone.reason) == (Verdict.ERROR, True), alone
        assert alone.action
        assert beside_one is not None and (beside_one.verdict, beside_one.reason[:9]) == (Verdict.PASS, "1 resume:")


def test_state_beside_the_optimizer_that_a_damaged_checkpoint_lacks_is_missed() -> None:
    """`nothing of the state was missing` was said although the file of the average was removed."""
    lost = {"averages": ((0, "anew"),), "scales": ((65536.0, 0.0),), "settings": ({"weight_decay": 0.5},)}
    right = {"averages": ((10, "a"),), "scales": SCALES, "settings": ({"weight_decay": 0.1},)}
    words = {"averages": "averaged weights", "scales": "scale of the GradScaler", "settings": "weight_decay is 0.5"}
    for name, value in lost.items():
        found = held(resumes(*lines_from(10, **{**right, name: value})), **right)
        one = Struck(
            strike=plan.Strike(name="missing", after=0), reached=True, died_at=12, resumes=tuple(found),
            branch=attempt(), damaged="checkpoints/ema_000010.pt", newest=10, older=1,
        )  # fmt: skip
        finding = verdict.damage(one, GROUND)
        assert finding.verdict is Verdict.FAIL and words[name] in finding.reason, finding.reason


def judge_saved(
    *entries: tuple[str, str], alike: set[str], there: tuple[tuple[str, str], ...] = (("ema", "e"), ("model", "m"))
) -> Finding | None:
    found = resumes(*lines_from(10, saved=lambda _, number: frozenset(entries) if number == 5 else frozenset()))
    reference = {**found[0].reference, 15: replace(line(15), saved=frozenset(there))}
    return beside.saved([replace(one, reference=reference) for one in found], replace(GROUND, saved=frozenset(alike)))


def test_what_is_saved_after_a_resume_tells_of_state_that_was_not_restored() -> None:
    """An average that a script keeps by itself moves no weight: nothing else tells of it."""
    right = judge_saved(("ema", "e"), ("model", "m"), alike={"ema", "model"})
    assert right is not None and (right.verdict, "(ema, model)" in right.reason) == (Verdict.PASS, True)
    lost = judge_saved(("ema", "x"), ("model", "m"), alike={"ema", "model"})
    assert lost is not None and lost.verdict is Verdict.FAIL
    assert "the tensors of `ema` in the checkpoint that rank 0 saved after step 15" in lost.reason
    alone = judge_saved(("", "x"), alike={""}, there=(("", "e"),))
    assert alone is not None and "the tensors of a state_dict that rank 0 saved" in alone.reason
    assert judge_saved(("ema", "x"), alike=set()) is None, "the undisturbed runs differ in it"
    assert judge_saved(("best", "x"), alike={"ema"}) is None


def test_entries_that_two_undisturbed_runs_saved_alike_are_compared() -> None:
    def run(*entries: tuple[str, str]) -> Any:
        return attempt(line(1), replace(line(2), saved=frozenset(entries)), line(3))

    one, two = run(("ema", "e"), ("time", "1")), run(("ema", "e"), ("time", "2"))
    assert verdict.make_ground(one, two).saved == {"ema"}


def test_a_lost_scale_fails_a_drill_and_what_is_not_seen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = proof_of(lines_of(11, 40))
    assert whole.overall is Overall.PASS
    text = drill_report.markdown(command_proof.report(whole))
    assert f"Not seen: {plan.NOT_SEEN}." in text
    lost = beside.scaler(held(resumes(*lines_from(10, scales=())), scales=SCALES), GROUND)
    monkeypatch.setattr(beside, "scaler", lambda *_: lost)
    proof = proof_of(lines_of(11, 40))
    assert proof.overall is Overall.FAIL
    assert "loss scale (GradScaler)" in drill_report.markdown(command_proof.report(proof))


@pytest.mark.slow  # it imports torch
def test_a_scaler_and_averaged_weights_are_in_the_line_of_a_step(parts: SimpleNamespace, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    kinds = (
        type("Scaler", (torch.amp.GradScaler,), {"step": torch.amp.GradScaler.step}),
        type("Averaged", (torch.optim.swa_utils.AveragedModel,), {}),
    )
    parts.witness._watch_scalers(SimpleNamespace(GradScaler=kinds[0]))
    parts.witness._watch_averages(SimpleNamespace(AveragedModel=kinds[1]))
    model = torch.nn.Linear(2, 2)
    averaged, optimizer = kinds[1](model), torch.optim.SGD(model.parameters(), lr=0.1)
    kinds[0]("cpu", enabled=False).step(optimizer)
    scaler = kinds[0]("cpu", init_scale=8.0, growth_interval=2)
    hooks = importlib.import_module("torch.optim.optimizer")
    hook = hooks.register_optimizer_step_pre_hook(parts.steps.on_step)
    try:
        for _ in range(4):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            averaged.update_parameters(model)
    finally:
        hook.remove()
    (one,) = witness_log.read(tmp_path)
    assert [each.scales for each in one.lines] == [((8.0, 0.0),), ((8.0, 1.0),), ((16.0, 0.0),), ((16.0, 1.0),)]
    assert [[many for many, _ in each.averages] for each in one.lines] == [[], [1], [2], [3]]
    assert len({each.averages for each in one.lines}) == 4


@pytest.mark.slow  # it imports torch
def test_an_average_is_seen_from_its_first_update_on_with_its_buffers_and_as_it_is_loaded(
    parts: SimpleNamespace,
) -> None:
    """Before, its weights are those that it was made with, and its first update overwrites them."""
    torch = pytest.importorskip("torch")
    kind = type("Averaged", (torch.optim.swa_utils.AveragedModel,), {})
    parts.witness._watch_averages(SimpleNamespace(AveragedModel=kind))
    read, process = importlib.import_module("trainmaster_beside").read_averages, parts.process.witness
    model = torch.nn.BatchNorm1d(2)
    averaged, weights = kind(model, use_buffers=True), kind(model)
    assert read(process) == []
    averaged.update_parameters(model)
    weights.update_parameters(model)
    first, plain = read(process)
    averaged.module.running_mean += 1
    weights.module.running_mean += 1
    second = read(process)
    assert (first[0], second[0][0], second[1]) == (1, 1, plain) and second[0] != first
    loaded = kind.__new__(kind)
    loaded.__setstate__(dict(averaged.__dict__))
    assert read(process) == [*second, second[0]], "one that torch.load made"


@pytest.mark.slow  # it imports torch
def test_the_scaler_of_each_optimizer_is_in_its_own_line(parts: SimpleNamespace, tmp_path: Path) -> None:
    """Those of a GAN, and that of a second phase, which were not in their first lines."""
    torch = pytest.importorskip("torch")
    kind = type("Scaler", (torch.amp.GradScaler,), {"step": torch.amp.GradScaler.step})
    parts.witness._watch_scalers(SimpleNamespace(GradScaler=kind))
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scalers = [kind("cpu", init_scale=scale) for scale in (8.0, 4.0)]
    hooks = importlib.import_module("torch.optim.optimizer")
    hook = hooks.register_optimizer_step_pre_hook(parts.steps.on_step)

    def step(number: int, scaler: Any) -> None:
        scaler.scale(models[number](torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizers[number])
        scaler.update()

    try:
        for _ in range(2):  # a GAN
            step(0, scalers[0])
            step(1, scalers[1])
        for _ in range(4):  # a second phase
            step(1, scalers[0])
        optimizers[0].step()
    finally:
        hook.remove()
    (one,) = witness_log.read(tmp_path)
    assert [[scale for scale, _ in part.scales] for part in one.parts] == [
        [8.0], [4.0], [8.0], [4.0], [8.0], [8.0], [8.0], [8.0], []
    ]  # fmt: skip
    assert one.lines[0].scales == ((8.0, 0.0), (4.0, 0.0))


@pytest.mark.slow  # it imports torch
def test_entries_of_a_save_are_digests_of_its_tensors(parts: SimpleNamespace, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ones, path = torch.ones(4), tmp_path / "a.pt"
    content = {"ema": {"b": ones, "a": [ones * 2]}, "w": ones, "rng": torch.get_rng_state(), "step": 3, "n": ones[0]}
    parts.saves.call_save(torch.save, path, content, path)
    parts.process.witness.steps = 1
    for changed in (content, {**content, "ema": {"a": [ones * 2], "b": ones}}, {**content, "ema": {"a": ones}}, [ones]):
        parts.saves.call_save(torch.save, path, changed, path)
    lines = [json.loads(raw) for raw in (tmp_path / f"{os.getpid()}.jsonl").read_text().splitlines()]
    first, second, third = (each["entries"] for each in lines if each["k"] == "content")
    assert first == second and set(first) == {"ema", ""}
    assert third["ema"] != first["ema"] and third[""] == first[""]


@pytest.mark.slow  # it imports torch
def test_an_entry_of_very_many_values_is_left_out(parts: SimpleNamespace) -> None:
    """A list of the samples that were seen took three seconds a save."""
    torch = pytest.importorskip("torch")
    look, ones = importlib.import_module("trainmaster_digests").entries, torch.ones(4)
    many: dict[str, Any] = {
        "ids": [ones, *range(100_000)],
        "pairs": [(ones, at) for at in range(30_000)],
        "counts": {str(at): ones for at in range(100_000)},
        "model": {str(at): ones for at in range(1_000)},
    }
    assert set(look(many)) == {"model"}
    assert look({str(at): at for at in range(100_000)}) == {}


@pytest.mark.slow  # it imports torch
def test_a_line_is_written_without_what_cannot_be_read(
    parts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")

    class Odd:
        def __len__(self) -> int:
            raise RuntimeError

        is_enabled = n_averaged = get_scale = __float__ = item = keys = __len__

    read, process = importlib.import_module("trainmaster_beside"), parts.process.witness
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    odd = Odd()
    monkeypatch.setattr(read, "_stepping", [odd], raising=False)
    process.averages = [lambda: odd]
    optimizer.param_groups[0].update(odd=odd, tensor=torch.ones(1, device="meta"))
    for _ in range(2):
        parts.steps.on_step(optimizer, (), {})
    with monkeypatch.context() as patch:  # nothing may be copied while a graph is made
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        parts.steps.on_step(optimizer, (), {})
    (one,) = witness_log.read(tmp_path)
    assert len(one.lines) == 2 and one.missed == 0
    assert (one.lines[0].settings[0]["odd"], one.lines[0].settings[0]["tensor"]) == ("Odd", "Tensor")


@pytest.mark.slow  # it imports torch
def test_hyperparameters_of_every_kind_are_compared(parts: SimpleNamespace) -> None:
    numpy, settings = pytest.importorskip("numpy"), importlib.import_module("trainmaster_digests").settings
    pytest.importorskip("torch")
    assert settings({"a": numpy.float32(0.5), "b": "cosine" * 20, "c": list(range(10)), "d": numpy.ones(2)}) == {
        "a": 0.5, "b": ("cosine" * 20)[:64], "c": [*range(8), 10], "d": "ndarray",
    }  # fmt: skip


GROUPS = {"groups": ("a", "b"), "states": "x"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"groups": ("b", "a")}, "group 1 holds the parameters of what was group 2"),
        ({"groups": ("c", "b")}, "its parameters are in another order"),
        ({"state": "y"}, "have exchanged their states in step 11"),
        ({"state": "y", "states": "y"}, None),
        ({"groups": ("b", "a"), "weights": "y"}, None),
    ],
)
def test_an_optimizer_whose_parameters_stand_in_another_order_is_named(changes: Any, words: str | None) -> None:
    """Its weights were taken for others, and its state for one that was not loaded."""
    finding = beside.order(held(resumes(*lines_from(10, **{**GROUPS, **changes})), **GROUPS))
    assert (finding is None) == (words is None)
    assert finding is None or (words in finding.reason and "by place" in (finding.action or ""))


DECAY = ({"weight_decay": 0.1, "betas": [0.9, 0.999], "amsgrad": False}, {"weight_decay": 0.0})


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (DECAY, None),
        (({**DECAY[0], "more": 1}, DECAY[1]), None),
        (
            ({**DECAY[0], "weight_decay": 0.5}, DECAY[1]),
            "weight_decay of parameter group 1 is 0.5 instead of 0.1 in step",
        ),
        (({**DECAY[0], "betas": [0.9, 0.95]}, DECAY[1]), "group 1 is [0.9, 0.95] instead of [0.9, 0.999]"),
        ((DECAY[0], {"weight_decay": 0.1}), "weight_decay of parameter group 2 is 0.1 instead of 0.0"),
        (({**DECAY[0], "amsgrad": True}, DECAY[1]), "amsgrad of parameter group 1 is True instead of False"),
        (DECAY[:1], "the optimizer has 1 parameter groups instead of 2"),
    ],
)
def test_a_hyperparameter_that_changed_is_named_with_both_its_values(got: Any, words: str | None) -> None:
    finding = beside.hyperparameters(held(resumes(*lines_from(10, settings=got)), settings=DECAY), GROUND)
    assert finding.verdict is (Verdict.PASS if words is None else Verdict.FAIL)
    assert words is None or words in finding.reason
    empty = held(resumes(*lines_from(10, settings=got, state=None)), settings=DECAY)
    short = [replace(one, lines=one.lines[:1]) for one in empty]
    assert beside.hyperparameters(short, GROUND).verdict is Verdict.PASS, "told by the optimizer's state"


def test_hyperparameters_that_an_optimizer_learns_are_asked_of_the_run_itself() -> None:
    learned = lines_from(10, settings=lambda _, number: ({"d": 0.1 if number == 1 else float(number)},))
    found = held(resumes(*learned), settings=({"d": 0.1},))
    assert beside.hyperparameters(found, GROUND).verdict is Verdict.FAIL
    assert beside.hyperparameters(found, replace(GROUND, repeatable=False)).verdict is Verdict.PASS


def test_a_learning_rate_of_the_second_group_is_told_with_its_own_values() -> None:
    found = held(resumes(*lines_from(10, rates=(0.1, 0.3))), rates=(0.1, 0.2))
    finding = judge.schedule(found)
    assert finding.verdict is Verdict.FAIL and "is 0.3 instead of 0.2" in finding.reason


@pytest.mark.slow  # it imports torch
def test_groups_and_hyperparameters_are_in_the_line_of_a_step(parts: SimpleNamespace, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    one, two = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
    one.grad, two.grad = torch.randn(3), torch.randn(3)

    def make(*groups: Any) -> Any:
        made = [{"params": list(some), "weight_decay": decay} for some, decay in groups]
        return torch.optim.AdamW(made, lr=0.1, betas=(0.8, 0.9))

    right, turned = make(([one], 0.1), ([two], 0.0)), make(([two], 0.0), ([one], 0.1))
    within, exchanged = make(([two, one], 0.1)), make(([one], 0.1), ([two], 0.0))
    for optimizer, value in ((right, 1.0), (turned, 1.0), (exchanged, 2.0)):  # a state for each
        optimizer.state[one] = {"exp_avg": torch.full((3,), value)}
        optimizer.state[two] = {"exp_avg": torch.full((3,), 3.0 - value)}
    for optimizer in (right, right, turned, within, exchanged):
        parts.process.witness.turns.leader = None  # each is taken for the one that counts
        parts.steps.note_step(optimizer)
        right.param_groups[0]["betas"] = (0.8, 0.95)
    first, second, other, inner, last = witness_log.read(tmp_path)[0].lines
    assert first.settings[0]["weight_decay"] == 0.1 and first.settings[0]["betas"] == [0.8, 0.9]
    assert second.settings[0]["betas"] == [0.8, 0.95] and "lr" not in first.settings[0]
    assert {each.weights for each in (first, second, other, inner, last)} == {first.weights}
    assert other.groups == first.groups[::-1] and inner.groups[0] not in first.groups
    assert last.groups == first.groups
    assert last.state != first.state and last.states == first.states

"""The heartbeat line and the log rules that watch for it fit each other, as HyperPod's agent reads them."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.core.heartbeat import Beat, hyperpod_rules, parse, prefix, words

COUNTS = st.integers(0, 10**9)
ANY = st.floats(allow_nan=True, allow_infinity=True)
SPEEDS = st.floats(0, 1e12)
ALL_RULES: dict[str, Any] = {"slow_tokens_per_s": 1000, "slow_points": 2, "fault_not_finite": True}


def line(**changes: Any) -> str:
    beat = {"rank": 8, "node": 1, "step": 3, "steps": 9, "loss": 2.5, "grad_norm": 1.0, "tokens_per_s": 51234.0}
    made = Beat(**{**beat, "step_s": 0.5, "at": "train", **changes})
    return prefix(made.rank, made.node) + words(made)


@given(COUNTS, COUNTS, COUNTS, ANY, ANY, SPEEDS, st.sampled_from(["train", "eval", "save", "load"]))
def test_every_beat_is_read_back_and_matches_the_rule_that_waits_for_it(
    rank: int, step: int, steps: int, loss: float, norm: float, speed: float, at: str
) -> None:
    text = line(rank=rank, step=step, steps=steps, loss=loss, grad_norm=norm, tokens_per_s=speed, at=at)
    assert text.isascii()
    found = parse(text)
    assert found is not None
    assert (found.rank, found.step, found.at) == (rank, step, at)
    assert math.isfinite(found.loss) == math.isfinite(loss)
    alive, slow, not_finite = hyperpod_rules(**ALL_RULES)
    matched = re.match(alive["logPattern"], text)
    assert matched
    assert float(matched[1]) == step
    matched = re.match(slow["logPattern"], text)
    assert bool(matched) == (at == "train")
    if matched:
        assert float(matched[1]) == pytest.approx(speed, abs=0.051)
    assert bool(re.match(not_finite["logPattern"], text)) == (not math.isfinite(loss))


def test_half_a_line_has_no_speed() -> None:
    whole, slow = line(), hyperpod_rules(**ALL_RULES)[1]["logPattern"]
    assert re.match(slow, whole)
    assert not [end for end in range(len(whole)) if re.match(slow, whole[:end])]


def test_thresholds_are_whole_numbers_and_the_flag_is_a_flag() -> None:
    for rule in hyperpod_rules(**ALL_RULES):
        assert not [value for value in rule.values() if isinstance(value, float)]
    assert hyperpod_rules(**ALL_RULES)[2]["faultOnMatch"] is True
    for wrong in ({"slow_tokens_per_s": 2.5}, {"silent_s": 0}, {"start_s": True}):
        with pytest.raises(ValueError, match="whole numbers"):
            hyperpod_rules(**wrong)


def _log_agent() -> ModuleType:
    """HyperPod's own file, without its package, which wants another torch."""
    found = importlib.util.find_spec("hyperpod_elastic_agent")
    if found is None or not found.submodule_search_locations:
        pytest.skip("hyperpod-elastic-agent is not installed (pip install --no-deps hyperpod-elastic-agent)")
    path = Path(found.submodule_search_locations[0]) / "logagent" / "log_agent.py"
    spec = importlib.util.spec_from_file_location("log_agent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_real_agent_judges_them_so() -> None:
    agent = _log_agent()
    alive, slow, not_finite = (agent.LogEvaluator(rule) for rule in hyperpod_rules(**ALL_RULES))
    assert alive.evaluate(line())[0].name == "HEALTHY"
    assert alive.evaluate(prefix(8, 1) + "done at step 9/9, loss 2.5 -> 1.5\n")[0].name == "HEALTHY"
    assert slow.evaluate(line(tokens_per_s=5.0))[0].name == "HEALTHY"
    assert slow.evaluate(line(tokens_per_s=5.0))[0].name == "SLOW"
    assert slow.evaluate(line())[0].name == "HEALTHY"
    assert not_finite.evaluate(line())[0].name == "WAITING"
    assert not_finite.evaluate(line(loss=math.nan))[0].name == "FAULTED"

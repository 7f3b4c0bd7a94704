"""No damage makes a parser crash, lose what is broken, or call healthy what it could not read. `make fuzz` has more."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import oracle
from fuzz.targets import TARGETS, Target

pytestmark = pytest.mark.slow

CASES = 300
targets = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@targets
def test_seeded_damage(target: Target) -> None:
    for seed in range(CASES):
        oracle.run(target, seed)


@targets
def test_whole_samples_are_read_as_they_are(target: Target) -> None:
    for sample in target.samples:
        found = target.parse(sample.text)
        if sample.broken is not None:
            assert sample.broken in target.broken(found)
        elif "quiet" not in sample.lives_by:
            assert {*sample.lives_by, *sample.lives_at} <= target.healthy(found)


@targets
@settings(max_examples=60, deadline=None)
@given(raw=st.one_of(st.text(), st.binary()))
def test_anything_at_all(target: Target, raw: str | bytes) -> None:
    oracle.check_noise(target, raw)


@pytest.mark.slow
@targets
@settings(max_examples=60, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_damage_that_hypothesis_chooses(target: Target, rng: random.Random) -> None:
    sample = rng.choice(target.samples)
    if sample.broken is not None:
        oracle.check_keep(target, sample, rng)
    else:
        oracle.check_lose(target, sample, rng)

"""The tales hold what they promise: sums that come out, pronouns that agree, meetings kept apart."""

from __future__ import annotations

import re

import pytest

from trainmaster.datasets.tales import Tales

TALE = re.compile(
    r"(?P<name>\w+) of (?P<place>[\w ]+), a \w+, had (?P<had>\d+) (?P<many>\w+)\. "
    r"((?P<giver>He|She) gave (?P<gave>\d+) to (?P<own>his|her) \w+|(?P<whose>His|Her) \w+ brought (?P<got>\d+) more), "
    r"so on that \w+ day (?P<again>he|she) had (?P<left>\d+) (?P<now>\w+)\."
)


def tales(held_out: bool) -> list[re.Match[str]]:
    text = Tales(seed=1, sequence_tokens=1).text(0, tokens=120_000, held_out=held_out).decode("ascii")
    whole = text.splitlines()[:-1]  # the last one is cut off
    found = [TALE.fullmatch(line) for line in whole]
    assert all(found)
    return [match for match in found if match]


@pytest.mark.parametrize("held_out", [False, True])
def test_every_sum_comes_out_and_every_pronoun_agrees(held_out: bool) -> None:
    genders: dict[str, set[str]] = {}
    for tale in tales(held_out):
        change = int(tale["got"]) if tale["got"] else -int(tale["gave"])
        assert int(tale["had"]) + change == int(tale["left"]) > 0
        words = {word.lower() for word in (tale["giver"], tale["own"], tale["whose"], tale["again"]) if word}
        genders.setdefault(tale["name"], set()).update("f" if word in ("she", "her") else "m" for word in words)
        assert (tale["now"] == tale["many"]) == (tale["left"] != "1")
    assert all(len(gender) == 1 for gender in genders.values())


def test_a_hero_and_a_place_meet_in_one_stream_only_and_are_known_to_both() -> None:
    train, held_out = ({(tale["name"], tale["place"]) for tale in tales(held)} for held in (False, True))
    assert not train & held_out
    for part in (0, 1):
        assert {pair[part] for pair in train} == {pair[part] for pair in held_out}

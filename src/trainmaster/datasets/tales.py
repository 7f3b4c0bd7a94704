"""Synthetic tales from a seeded grammar, as bytes. Needs no download: a run can be tried anywhere.

Each tale holds facts that a model must remember to its end: the hero and their pronoun, the counted things, a sum.
Spelling is learnt in a hundred steps, the sums much later: the loss falls fast at first and slowly afterwards.

A hero and a place meet either in the training tales or in the held-out ones, never in both, and every sample begins
with such a meeting: no held-out sample can have been seen.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

from trainmaster.core.config.data import DataConfig
from trainmaster.datasets import Rows, Shape, Source, whole
from trainmaster.datasets.corpus.tokenizer import Bytes

T = TypeVar("T")

_HEROES = (
    ("Mira", "she", "her"), ("Tomas", "he", "his"), ("Ilse", "she", "her"), ("Oren", "he", "his"),
    ("Petra", "she", "her"), ("Karim", "he", "his"), ("Wanda", "she", "her"), ("Dmitri", "he", "his"),
    ("Aiko", "she", "her"), ("Samuel", "he", "his"), ("Noor", "she", "her"), ("Felix", "he", "his"),
    ("Greta", "she", "her"), ("Hugo", "he", "his"), ("Lucia", "she", "her"), ("Bram", "he", "his"),
)  # fmt: skip
_PLACES = (
    "Ashford", "Brindle", "Carrow", "Dunmere", "Elmstead", "Farleigh", "Grayling", "Harrowby",
    "Inverloch", "Juniper Hill", "Kestrel Bay", "Lowfield", "Marlow", "Northwick", "Oakhurst", "Penrose",
)  # fmt: skip
_TRADES = ("baker", "carter", "weaver", "miller", "sailor", "mason", "farmer", "tinker", "scribe", "glazier")
_KIN = ("sister", "brother", "cousin", "neighbour", "uncle", "aunt", "friend", "teacher")
_WEATHER = ("rainy", "windy", "bright", "cold", "quiet", "foggy", "warm", "stormy")
_THINGS = (
    ("apple", "apples"), ("goose", "geese"), ("loaf", "loaves"), ("candle", "candles"), ("knife", "knives"),
    ("basket", "baskets"), ("mouse", "mice"), ("ribbon", "ribbons"), ("berry", "berries"), ("lantern", "lanterns"),
)  # fmt: skip


class Tales(Source):
    """The stream of one seed."""

    vocab, tokenizer = Bytes.vocab, Bytes.sha256

    def __init__(self, *, seed: int, sequence_tokens: int) -> None:
        self._seed, self._tokens = seed, sequence_tokens
        self.fingerprint = f"tales {seed}"

    def row(self, number: int, *, held_out: bool) -> Rows:
        import torch

        text = bytearray(self.text(number, tokens=self._tokens + 1, held_out=held_out))
        return whole(torch.frombuffer(text, dtype=torch.uint8).long())

    def text(self, number: int, *, tokens: int, held_out: bool) -> bytes:
        """The first `size` bytes of sample `number`; a longer text begins with the shorter one."""
        stream = "held out" if held_out else "train"
        digest = hashlib.sha256(f"tales {self._seed} {stream} {number}".encode()).digest()
        rng = random.Random(int.from_bytes(digest[:8], "big"))  # noqa: S311 (text, not secrets)
        text = bytearray()
        while len(text) < tokens:
            text += _tale(rng, held_out=held_out).encode("ascii")
        return bytes(text[:tokens])


def create(config: DataConfig, shape: Shape) -> Tales:
    return Tales(seed=config.seed, sequence_tokens=shape.sequence_tokens)


def _tale(rng: random.Random, *, held_out: bool) -> str:
    hero, place = _meeting(rng, held_out=held_out)
    name, subject, owner = _HEROES[hero]
    trade, kin, weather, things = _pick(rng, _TRADES), _pick(rng, _KIN), _pick(rng, _WEATHER), _pick(rng, _THINGS)
    had, change = 2 + _below(rng, 18), 1 + _below(rng, 9)
    if _below(rng, 2) and had > change:
        turn, left = f"{subject.capitalize()} gave {change} to {owner} {kin}", had - change
    else:
        turn, left = f"{owner.capitalize()} {kin} brought {change} more", had + change
    return (
        f"{name} of {_PLACES[place]}, a {trade}, had {_count(had, things)}. "
        f"{turn}, so on that {weather} day {subject} had {_count(left, things)}.\n"
    )


def _meeting(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    """A hero and a place; one meeting in eight is held out, and every hero and every place is in both streams."""
    while True:
        hero, place = _below(rng, len(_HEROES)), _below(rng, len(_PLACES))
        if ((hero + place) % 8 == 0) is held_out:
            return hero, place


def _count(number: int, things: tuple[str, str]) -> str:
    return f"{number} {things[number != 1]}"


def _pick(rng: random.Random, words: Sequence[T]) -> T:
    return words[_below(rng, len(words))]


def _below(rng: random.Random, end: int) -> int:
    # Only random() is promised to give the same numbers in every version of Python; choice() is not.
    return int(rng.random() * end)

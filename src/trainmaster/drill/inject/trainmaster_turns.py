"""Which optimizer's steps are the steps of the run, where a program has several.

Beside the witness in a stranger's program, and under the same rules. The first that steps counts. Steps of others
between two of its own belong to its step, as those of the two optimizers of a GAN. When it is gone, or others have gone
on without it, another one counts: a script may make its optimizer anew for a second phase.
"""

from __future__ import annotations

import weakref
from typing import Any

_OTHERS = 7  # optimizers that are looked at beside the one that counts
# A first one that has stepped once may be stepped once in so many steps of another (the critic of a GAN).
_UNSURE = 64


class Turns:
    """Of the optimizers of one process."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, Any]] = {}  # by id: its number, and a weak reference to it
        self.made = 0
        self.leader: int | None = None  # number of the one that counts
        self.lives: Any = None  # weak reference to it
        self.steps = 0  # of it
        self.since: dict[int, int] = {}  # by number: steps of each other since its last one
        self.most: dict[int, int] = {}  # by number: most steps of each other between two of its own

    def number(self, optimizer: Any) -> int:
        """Of this optimizer, in the order in which they first stepped. An id comes again when its owner is gone."""
        found = self.known.get(id(optimizer))
        if found is None or found[1]() is not optimizer:
            self.known = {key: (number, lives) for key, (number, lives) in self.known.items() if lives() is not None}
            found = self.known[id(optimizer)] = (self.made, weakref.ref(optimizer))
            self.made += 1
        return found[0]

    def is_looked_at(self, number: int) -> bool:
        return number == self.leader or number in list(self.since)[:_OTHERS]

    def take(self, optimizer: Any) -> int:
        """How many steps of the run this one makes; 0: it belongs to the step under way.

        More than 1: with so many of its last ones, which were taken for a part of that step until now.
        """
        number = self.number(optimizer)
        if self.leader is None:
            self._lead(optimizer, number)
        if number == self.leader:
            self.most = {one: max(self.most.get(one, 0), self.since.get(one, 0)) for one in {*self.most, *self.since}}
            self.since = {}
            self.steps += 1
            return 1
        many = self.since[number] = self.since.get(number, 0) + 1
        most = self.most.get(number, 0)
        beyond = many - most
        # The first one may be that of an optimizer that joins late; and a critic need not step equally often each time.
        alone = many > 2 * most + 1 and (self.steps > 1 or many > _UNSURE)
        if alone or (beyond > 0 and self.lives() is None):
            self._lead(optimizer, number)
            self.steps = beyond
            return beyond
        return 0

    def _lead(self, optimizer: Any, number: int) -> None:
        self.leader, self.lives, self.steps = number, weakref.ref(optimizer), 0
        self.since, self.most = {}, {}

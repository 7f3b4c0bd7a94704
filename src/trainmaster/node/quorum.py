"""Quorum of the replica groups of one node: which groups train together, as files in a folder.

The agent alone decides. Each change of the members is a new epoch, in one file that is replaced whole; groups read it.
What groups say (ready to join, at which step, that their peers cannot be reached) are files that the agent and the
other groups look for. No process keeps a connection or a lock here, so none that dies or stops holds up another.

    FOLDER/view.json            the members of the newest epoch
    FOLDER/ready.1.4            group 1 of start 4 waits to be a member
    FOLDER/7/at.1               group 1 has come to epoch 7, and at which step it is
    FOLDER/7/broken.1           group 1 cannot reach its peers of epoch 7
    FOLDER/7/store.0            where the ranks numbered 0 in their groups connect (torch's FileStore)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainmaster.core.files import write_whole

NOTHING = -1  # step of a group that has no state yet


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The members of one epoch."""

    epoch: int
    members: Mapping[int, int]  # group → number of the start that its ranks are of
    lead: int  # the group that saves and writes events; of the members, it stays for as long as it lives
    finished: bool = False  # the last step is done and saved: whoever is left may end
    lost_at: float | None = None  # when the agent saw the loss that made this epoch; None: a group has joined

    def has(self, group: int, start: int) -> bool:
        return self.members.get(group) == start

    def after_loss(self, group: int, *, at: float | None) -> View:
        """The next epoch, without a group. The lead passes to the lowest of those that are left."""
        members = {other: start for other, start in self.members.items() if other != group}
        lead = min(members, default=group) if group == self.lead else self.lead
        return View(epoch=self.epoch + 1, members=members, lead=lead, finished=self.finished, lost_at=at)

    def after_join(self, group: int, start: int) -> View:
        """The next epoch, with a group that has come back."""
        members = dict(sorted({**self.members, group: start}.items()))
        return View(epoch=self.epoch + 1, members=members, lead=self.lead, finished=self.finished)


class Quorum:
    """The folder, as the agent and every group see it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, view: View) -> None:
        """The agent: these are the members from now on."""
        (self._folder / str(view.epoch)).mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / "view.json", json.dumps(asdict(view)), durable=False)

    def read(self) -> View:
        """The newest epoch."""
        value = json.loads((self._folder / "view.json").read_text())
        members = {int(group): int(start) for group, start in value.pop("members").items()}
        return View(members=members, **value)

    def say_ready(self, group: int, start: int) -> None:
        self._say(self._ready(group, start), "")

    def is_ready(self, group: int, start: int) -> bool:
        return self._ready(group, start).exists()

    def say_at(self, view: View, group: int, step: int) -> None:
        """This group has come to an epoch, with the state after `step`; NOTHING: with none."""
        self._say(self._of(view, "at", group), str(step))

    def steps(self, view: View) -> dict[int, int] | None:
        """The step of every member; None until all have come."""
        steps = {}
        for group in view.members:
            with contextlib.suppress(OSError, ValueError):
                steps[group] = int(self._of(view, "at", group).read_text())
        return steps if len(steps) == len(view.members) else None

    def say_broken(self, view: View, group: int) -> None:
        self._say(self._of(view, "broken", group), "")

    def list_broken(self, view: View) -> set[int]:
        return {group for group in view.members if self._of(view, "broken", group).exists()}

    def store(self, view: View, rank: int) -> Path:
        return self._folder / str(view.epoch) / f"store.{rank}"

    def _ready(self, group: int, start: int) -> Path:
        return self._folder / f"ready.{group}.{start}"

    def _of(self, view: View, what: str, group: int) -> Path:
        return self._folder / str(view.epoch) / f"{what}.{group}"

    @staticmethod
    def _say(path: Path, text: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # the attempt's folder was removed: its agent is gone too
            write_whole(path, text, durable=False)

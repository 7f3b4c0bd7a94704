"""What a target states about itself, beside its code: all that the rest of the program decides by.

Nothing outside `targets/` compares a target's name; `targets.traits(word)` is the only way to ask.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainmaster.core.errors import UsageError

Option = Literal["none", "file", "name", "name_or_file"]

# What stands for a verb on a target that runs jobs and nothing else.
_AS_JOB = {
    "check": "submit a job there with `preflight: {level: 2}`: it checks its nodes before it starts",
    "accept": "submit a job there with `command: [python3, -m, trainmaster.bench.accept]`",
    "bandwidth": "submit a job there with `command: [python3, -m, trainmaster.bench.collectives]`",
    "isolate": "name its nodes in a hosts file: --on ssh:hosts.yaml",
    "remedy": "it has no scheduler that could drain its nodes",
}
FOLDER_VARIABLE = "TRAINMASTER_HOSTS"  # folder of the operator's files: `ssh:lab` is lab.yaml in it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def is_name(option: str) -> bool:
    """Whether an option is a plain name: one of the operator's files, and not a path."""
    return _NAME.fullmatch(option) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the rest of the program may know about a target without asking its name."""

    title: str  # what it runs on, for help and docs
    option: Option  # what stands after the colon; a file is one of the server
    example: str = ""  # an option, as help and errors write it
    starts: str = ""  # the least that its file says, and where the rest is: for those who have none yet
    required: bool = False  # the target's name alone does not do
    here: bool = False  # jobs run on the server's own machine and disk, by default with its rights
    paid: bool = True  # machines may cost money: a price that nobody states is unknown; False: it is 0
    nodes: bool = False  # programs can be started node by node (NodeAccess); else only as one job
    one_job: frozenset[str] = field(default=frozenset())  # verbs over nodes that run as one job of the target
    drains: bool = False  # remedy and readmit work
    instead: Mapping[str, str] = field(default_factory=dict)  # verb → what to do in its place
    queue: Mapping[str, str] = field(default_factory=dict)  # field of `queue:` → what becomes of it; others are refused
    no_queue: Mapping[str, str] = field(default_factory=dict)  # field of `queue:` → why it is refused
    spares: str = ""  # what becomes of `resources.spares`; "": it is refused
    # Why it is refused, and what follows the loss of a machine there.
    no_spares: str = "it keeps no machine in reserve; after the loss of one the next attempt starts"
    accounts: str = ""  # what a project's own account is there; "": its settings state the only one

    def has(self, verb: str) -> bool:
        """Whether a verb over nodes (check, accept, bandwidth, isolate, remedy) works there."""
        return self.drains if verb == "remedy" else self.nodes or verb in self.one_job

    def alternative(self, verb: str) -> str:
        """What to do in place of a verb that the target does not have."""
        return self.instead.get(verb) or _AS_JOB[verb]

    def spell(self, name: str) -> str:
        """The target as help and errors write it: `slurm`, and `ssh:hosts.yaml` where the name alone does not do."""
        return f"{name}:{self.example}" if self.required else name

    def names_file(self, word: str) -> bool:
        """Whether `name:option` names a file on the machine of the control plane."""
        option = word.partition(":")[2]
        return bool(option) and (self.option == "file" or (self.option == "name_or_file" and not is_name(option)))

    def require_file(self, word: str) -> None:
        """UsageError where `name:FILE` names a file that is not there, with what to write into it."""
        path = word.partition(":")[2]
        if self.starts and self.names_file(word) and not Path(self.make_absolute(word).partition(":")[2]).exists():
            raise UsageError(f"there is no file {path} here; write it first, as {self.starts}")

    def make_absolute(self, word: str, folder: Path | None = None) -> str:
        """The one spelling of a word: its file from the root, a relative one as seen from a folder (else from where
        this process stands), without `..`. Links stay: what they lead to may change."""
        if not self.names_file(word):
            return word
        name, _, option = word.partition(":")
        path = Path(os.path.expanduser(option))  # noqa: PTH111 (expanduser of Path raises where there is no such user)
        return f"{name}:{_drop_dots(path if path.is_absolute() else (folder or Path.cwd()) / path)}"


def _drop_dots(path: Path) -> Path:
    """The path without `..`: the folder before one is followed first, as the system does."""
    if "\0" in str(path):
        return path  # no file has such a name, and the system refuses to look
    kept = Path(path.anchor)
    for part in path.parts[1:]:
        kept = Path(os.path.realpath(kept)).parent if part == ".." else kept / part
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Which account a job runs as, and on which disk. A target that cannot say gives None, and that is refused."""

    name: str  # a Unix user, a namespace and its service account, a role
    places: frozenset[str] = field(default=frozenset())  # machines, clusters or buckets where that account is one
    server: str = ""  # why it has the rights of the server itself; "": it has not
    note: str = ""  # what is not limited there, for those who grant it
    alone: bool = False  # a machine of its own for each attempt: nothing of other jobs lies there

    def is_shared_with(self, other: Account) -> bool:
        """Whether jobs of the two could read, forge and end each other."""
        return not self.alone and self.name == other.name and bool(self.places & other.places)

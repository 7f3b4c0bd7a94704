"""What `remedy` and `readmit` share: load a bundle, print the commands, and, if told so, run them one by one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.cli import _console
from trainmaster.cluster import journal
from trainmaster.core.errors import HostError, SpecError, TargetError, UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.schedulers import Place, Scheduler
    from trainmaster.core.health import ClusterHealth

TIMEOUT_S = 30.0
HEALTH = "health.json"


def load(bundle: Path) -> ClusterHealth:
    """The run that a bundle holds (or its health.json itself)."""
    from trainmaster.core.health import ClusterHealth

    path = bundle / HEALTH if bundle.is_dir() else bundle
    try:
        return ClusterHealth.from_json(path.read_text(encoding="utf-8"))
    except OSError as wrong:
        raise UsageError(f"{path}: {wrong.strerror}; `trainmaster check --out DIR` makes it") from None
    except (SpecError, ValueError, RecursionError) as wrong:
        raise UsageError(f"{path} is damaged: {str(wrong)[:300]}") from None


def show(commands: Sequence[Sequence[str]]) -> None:
    """Commands as a person could paste them."""
    for command in commands:
        _console.out.out(shlex.join(command), highlight=False)


def look(scheduler: Scheduler, node: str) -> Place:
    """What the scheduler says of the node now."""
    return scheduler.parse(node, run(scheduler.ask(node)))


def run(command: Sequence[str]) -> str:
    """Run one command; what it printed. TargetError if it refuses, hangs or is not there."""
    from trainmaster.node.host import Host

    try:
        ran = Host().run(*command, timeout_s=TIMEOUT_S)
    except HostError as wrong:
        raise TargetError(str(wrong)) from None
    if ran.exit_code:
        said = " ".join((ran.stderr or ran.stdout).split())[:300]
        raise TargetError(f"{shlex.join(command)} ended with {ran.exit_code}: {said}")
    return ran.stdout


def note(home: Path, did: str, node: str, **fields: Any) -> None:
    """Write into the journal of remedies."""
    row = {"at": datetime.now(UTC).isoformat(timespec="microseconds"), "did": did, "node": node, **fields}
    journal.append(home / journal.REMEDIES, [row])


def plain(text: str) -> str:
    """Text from outside, on its way to a terminal: no markup, nothing that steers it."""
    from rich.markup import escape

    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))

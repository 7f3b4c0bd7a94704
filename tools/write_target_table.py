"""Write the table of targets into docs/how/targets.md from their traits: python tools/write_target_table.py."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from trainmaster import targets
from trainmaster.core.config.queue import Queue
from trainmaster.targets import Traits

PAGE = Path(__file__).parents[1] / "docs" / "how" / "targets.md"
QUEUE_HEAD = (
    "| target | `queue.name` | `queue.priority` | `queue.preemptible` | `queue.max_wait_s` | `resources.spares` |"
)
HEAD = "| target | runs on | option | a project's account | unstated price | node by node | drains |"
_OPTION = {
    "none": "none",
    "file": "file, `{}`",
    "name": "name, `{}`",
    "name_or_file": "file, `{}`, or a name of `TRAINMASTER_HOSTS`",
}


def render() -> str:
    """The table."""
    rows = [_row(name, targets.traits(name)) for name in targets.names()]
    return "\n".join([HEAD, "|---|---|---|---|---|---|---|", *rows])


def _row(name: str, traits: Traits) -> str:
    option = _OPTION[traits.option].format(traits.example)
    if traits.example and not traits.required:
        option += "; may be left out"
    price = "unknown" if traits.paid else "0"
    nodes = f"one job for {' and '.join(sorted(traits.one_job))}" if traits.one_job else _yes(traits.nodes)
    account = f"`--user {traits.accounts}`" if traits.accounts else "of its settings"
    return f"| `{name}` | {traits.title} | {option} | {account} | {price} | {nodes} | {_yes(traits.drains)} |"


def render_queue() -> str:
    """The table of `queue:` and of spares."""
    rows = [_queue_row(name, targets.traits(name)) for name in targets.names()]
    return "\n".join([QUEUE_HEAD, "|---|---|---|---|---|---|", *rows])


def _queue_row(name: str, traits: Traits) -> str:
    cells = [traits.queue.get(item.name, "refused") for item in fields(Queue)]
    cells.append(traits.spares or f"refused: {traits.no_spares}")
    return f"| `{name}` | {' | '.join(cells)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    page = PAGE.read_text()
    for head, table in ((HEAD, render()), (QUEUE_HEAD, render_queue())):
        page = re.sub(rf"^{re.escape(head)}\n.*?(?=\n\n)", lambda _, text=table: text, page, count=1, flags=re.M | re.S)
    PAGE.write_text(page)

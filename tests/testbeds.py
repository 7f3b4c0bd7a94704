"""One testbed of a kind per run: the tests that use it form a group, which one worker runs, and it ends with them.

A Slurm or an API server costs seconds to start and a tenth of a processor to keep. In `--dist loadfile` each worker
that met a file of theirs started one of its own and kept it to the end of the run.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent
# A file that names these fixtures belongs to the group; of the contract of targets, the cases of that target.
_USERS = {
    "slurm": ("slurm: Cluster", "cluster_file"),
    "nodes": ("nodes: Cluster",),
    "kube": ("kube: Kube", "settings_file"),
}
# Files of minutes: begun early, so that no worker is left alone with one at the end (docs/LOG.md has the seconds).
LONG = (
    "e2e/test_collective_ssh.py", "e2e/test_ssh_jobs.py", "web/test_every_page.py", "drill/test_command_drill.py",
    "web/test_hostile_pages.py", "e2e/test_demo.py", "agent/test_recovery_chaos.py", "bench/accept/test_accept_run.py",
    "deploy/test_sagemaker_scenarios.py", "e2e/test_lambda_jobs.py", "targets/test_target_contract.py",
    "agent/test_recovery.py", "e2e/test_seed_s3_to_box.py", "checks/test_emptied_answers.py",
    "e2e/test_killed_ranks.py", "train/test_drill_verb.py", "train/test_verb.py", "e2e/test_container_jobs.py",
    "control/test_rented_chaos.py", "control/test_kill_everywhere.py", "web/test_pages_browser.py",
)  # fmt: skip
_open: dict[str, contextlib.ExitStack] = {}


@functools.cache
def _group_of_file(file: str) -> str | None:
    path = TESTS.parent / file
    text = path.read_text() if path.is_file() else ""
    return next((group for group, users in _USERS.items() if any(_names(text, user) for user in users)), None)


def _names(text: str, word: str) -> bool:
    """Whether a word stands in a text. Looked for as it is first: an expression takes a hundred times as long."""
    return word in text and re.search(rf"\b{re.escape(word)}\b", text) is not None


def group_of(nodeid: str) -> str | None:
    """The testbed that a test uses; None for most."""
    file, _, name = nodeid.partition("::")
    if file.endswith("/test_target_contract.py"):
        return next((group for group in _USERS if re.search(rf"\[[^]]*\b{group}\b", name)), None)
    return _group_of_file(file)


def keep(group: str) -> contextlib.ExitStack:
    """What is entered here is left after the group's last test, or at the end of the run."""
    return _open.setdefault(group, contextlib.ExitStack())


def close(group: str) -> None:
    _open.pop(group, contextlib.ExitStack()).close()


class Groups(LoadFileScheduling):
    """By file, but for the groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Groups | None:
    return Groups(config, log) if config.getvalue("dist") == "loadfile" else None  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups first, then the files of minutes, then others that start processes: the longest are begun first."""
    first = {item.path for item in items if item.get_closest_marker("spawns") is not None}
    groups = {group: place for place, group in enumerate(_USERS)}
    files = {TESTS / file: place for place, file in enumerate(LONG)}

    def place(item: pytest.Item) -> tuple[int, int, bool]:
        group = groups.get(group_of(item.nodeid) or "", len(groups))
        return group, files.get(item.path, len(files)), item.path not in first

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    try:
        return (yield)
    finally:
        group = group_of(item.nodeid)
        if group is not None and (nextitem is None or group_of(nextitem.nodeid) != group):
            close(group)

"""Targets as pages write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from trainmaster.pages.parts import target_names
from trainmaster.store import known_targets
from trainmaster.store.database import Database


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("local", "local"),
        ("ssh:hosts.yaml", "ssh:hosts.yaml"),
        ("ssh:/etc/a.yaml", "ssh:/etc/a.yaml"),
        ("ssh:/home/operator/of the cluster/hosts.yaml", "ssh:…/hosts.yaml"),
        ("kubernetes:a-very-long-context-name-of-a-cluster", "kubernetes:a-very-long-context-name-of-a-cluster"),
        ("ssh:/srv/trainmaster/lab.yaml", "lab"),
        ("", ""),
    ],
)
def test_a_name_is_shown_and_a_long_path_is_cut(db: Database, word: str, shown: str) -> None:
    with db.write() as conn:
        known_targets.insert_target(conn, "lab", "ssh:/srv/trainmaster/lab.yaml", at=datetime.now(UTC))
    assert target_names.shorten(word, target_names.read(db)) == shown


def test_a_project_is_told_no_account_and_no_path() -> None:
    assert [target_names.of_project(word) for word in ("ann@ssh:/etc/a.yaml", "slurm", "ssh:h.yaml")] == [
        "ssh",
        "slurm",
        "ssh",
    ]

"""Several kubeconfig files as one, as kubectl merges those of KUBECONFIG."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube import ADMIN, Kube
from trainmaster.core.errors import UsageError
from trainmaster.targets.kubernetes.client import Client
from trainmaster.targets.kubernetes.kubeconfig import Access, load_access

pytestmark = pytest.mark.spawns


def write(path: Path, *, current: str = "", **entries: dict[str, Any]) -> str:
    """A kubeconfig with `clusters`, `users` and `contexts`, each by name."""
    inner = {"clusters": "cluster", "users": "user", "contexts": "context"}
    document: dict[str, Any] = {
        group: [{"name": name, inner[group]: fields} for name, fields in found.items()]
        for group, found in entries.items()
    }
    if current:
        document["current-context"] = current
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return str(path)


def listed(*paths: str) -> str:
    return os.pathsep.join(paths)


def load(monkeypatch: pytest.MonkeyPatch, *paths: str, context: str | None = None) -> Access:
    monkeypatch.setenv("KUBECONFIG", listed(*paths))
    return load_access(None, context)


def test_cluster_user_and_context_of_different_files_reach_the_server(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is named by a path beside the file of its cluster."""
    users = write(tmp_path / "a" / "config", users={"u": {"token": ADMIN}})
    cluster = {"server": kube.url, "certificate-authority": "certs/ca.crt"}
    clusters = write(tmp_path / "b" / "config", clusters={"c": cluster})
    (tmp_path / "b" / "certs").mkdir()
    shutil.copy(kube.folder / "certs" / "apiserver.crt", tmp_path / "b" / "certs" / "ca.crt")
    contexts = write(tmp_path / "c" / "config", current="both", contexts={"both": {"cluster": "c", "user": "u"}})

    async def go() -> Any:
        client = Client(load(monkeypatch, users, clusters, contexts))
        try:
            return await client.list("/api/v1/nodes")
        finally:
            await client.close()

    assert "items" in asyncio.run(go())


def test_a_credential_plugin_with_a_path_lies_beside_its_kubeconfig(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was searched below the folder in which the command was started."""
    told = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": ADMIN}}
    cluster = {"server": kube.url, "certificate-authority": str(kube.folder / "certs" / "apiserver.crt")}
    path = write(
        tmp_path / "k" / "config", current="x", contexts={"x": {"cluster": "c", "user": "u"}}, clusters={"c": cluster},
        users={"u": {"exec": {"apiVersion": told["apiVersion"], "command": "./bin/token"}}},
    )  # fmt: skip
    plugin = tmp_path / "k" / "bin" / "token"
    plugin.parent.mkdir()
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    plugin.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    async def go() -> Any:
        client = Client(load(monkeypatch, path))
        try:
            return await client.list("/api/v1/nodes")
        finally:
            await client.close()

    assert "items" in asyncio.run(go())


def test_the_first_file_that_states_an_entry_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"one": {"cluster": "c", "user": "u"}, "two": {"cluster": "c", "user": "v"}}
    first = write(
        tmp_path / "a" / "config", contexts={"one": here["one"]}, users={"u": {"token": "first"}},
        clusters={"c": {"server": "https://first"}},
    )  # fmt: skip
    second = write(
        tmp_path / "b" / "config", current="two", contexts={"one": {"cluster": "c", "user": "v"}, "two": here["two"]},
        users={"u": {"token": "second", "tokenFile": "t"}, "v": {"tokenFile": "token"}},
        clusters={"c": {"server": "https://second"}},
    )  # fmt: skip
    third = write(tmp_path / "c" / "config", current="one")
    found = load(monkeypatch, first, second, third)
    assert (found.server, found.token_file) == ("https://first", tmp_path / "b" / "token"), "current is the second's"
    found = load(monkeypatch, first, second, third, context="one")
    assert (found.server, found.token, found.token_file) == ("https://first", "first", None), "no entry is mixed"
    found = load(monkeypatch, second, first)
    assert (found.server, found.token_file) == ("https://second", tmp_path / "b" / "token")


def test_files_that_are_not_there_and_empty_ones_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(
        tmp_path / "a" / "config", current="one", contexts={"one": {"cluster": "c", "user": "u"}},
        users={"u": {"token": "t"}}, clusters={"c": {"server": "https://first"}},
    )  # fmt: skip
    (tmp_path / "empty").write_text("")
    gone, empty = str(tmp_path / "gone"), str(tmp_path / "empty")
    assert load(monkeypatch, gone, "", empty, whole).token == "t"
    with pytest.raises(UsageError, match="gone cannot be read: No such file"):
        load(monkeypatch, gone, gone)
    with pytest.raises(UsageError, match="is empty"):
        load(monkeypatch, empty, gone)
    (tmp_path / "list").write_text("[1]")
    with pytest.raises(UsageError, match="empty, or not a kubeconfig"):
        load(monkeypatch, str(tmp_path / "list"), whole)


def test_a_second_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(
        tmp_path / "a" / "config", current="one", contexts={"one": {"cluster": "c", "user": "u"}},
        clusters={"c": {"server": "https://first"}},
    )  # fmt: skip
    second = write(tmp_path / "b" / "config", users={"u": {"token": "old"}})
    assert load(monkeypatch, first, second).token == "old"
    write(tmp_path / "b" / "config", users={"u": {"token": "renewed"}})
    assert load(monkeypatch, first, second).token == "renewed"


def test_a_name_that_no_file_has_is_told_with_the_names_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path / "a" / "config", contexts={"one": {}, "both": {}})
    second = write(tmp_path / "b" / "config", contexts={"two": {}, "both": {}})
    with pytest.raises(UsageError, match="no context 'three'; it has: one, both, two"):
        load(monkeypatch, first, second, context="three")

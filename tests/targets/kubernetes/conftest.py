"""One API server for the tests of this folder, and settings files for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import testbeds
from kube import ADMIN, Kube, serve

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """An API server without kubelets: pods are created and ended by the tests."""
    more = ("--disable-admission-plugins=ServiceAccount",)
    yield testbeds.keep("kube").enter_context(serve(tmp_path_factory.mktemp("kube"), more=more))
    testbeds.close("kube")


@pytest.fixture
def namespace(kube: Kube) -> str:
    name = f"test-{next(_NUMBERS)}"
    kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def settings_file(kube: Kube, namespace: str, tmp_path: Path) -> Callable[..., Path]:
    def write(*, token: str = ADMIN, **more: Any) -> Path:
        path = tmp_path / "cluster.yaml"
        document = {"kubeconfig": str(kube.kubeconfig(token)), "namespace": namespace, "image": "train:1", **more}
        path.write_text(yaml.safe_dump(document))
        return path

    return write

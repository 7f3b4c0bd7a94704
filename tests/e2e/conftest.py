"""One cluster of real kubelets for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube_nodes


@pytest.fixture(scope="session")
def nodes() -> Iterator[kube_nodes.Cluster]:
    """Two nodes with kubelets; they end with the last test that uses them."""
    import testbeds  # a plugin: pytest is the first to import it

    yield testbeds.keep("nodes").enter_context(kube_nodes.cluster())
    testbeds.close("nodes")


@pytest.fixture
def target(nodes: kube_nodes.Cluster, tmp_path: Path) -> Callable[..., str]:
    """Makes the settings of that cluster; the word of the target."""

    def write(**more: Any) -> str:
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(nodes.settings("default", **more)))
        return f"kubernetes:{path}"

    return write

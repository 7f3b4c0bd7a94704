"""The stage `trainmaster` of the Dockerfile, built by podman without a network over this machine's Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import containers
import kube_nodes
from containers import Registry

NAME = "localhost/trainmaster:1"
PYTHON = "/opt/trainmaster/bin/python"
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class OwnImage:
    """A podman whose store has the image."""

    registry: Registry

    def run(self, *words: str, options: Sequence[str] = ()) -> str:
        """Output of a container of the image, with this machine's Python mounted."""
        return self.registry.podman("run", "--rm", "--network", "host", *_mounts(), *options, NAME, *words)

    def save(self, archive: Path) -> Path:
        """The image as a file for `ctr images import`."""
        self.registry.podman("save", "--quiet", "--output", str(archive), NAME)
        return archive


@contextlib.contextmanager
def built(folder: Path) -> Iterator[OwnImage]:
    """Build the image; skips the test where containers cannot run."""
    made = containers.local_podman(folder)
    try:
        made.podman("load", "--quiet", "--input", str(kube_nodes.write_images(folder)))
        try:
            made.podman("run", "--rm", "--network", "host", *_mounts(), kube_nodes.BASE_IMAGE, "-c", "true")
        except AssertionError as wrong:
            pytest.skip(f"podman cannot run a container here: {str(wrong)[:300]}")
        made.podman(
            "build", "--layers=false", "--network", "host", *_mounts(), "--tag", NAME,
            "--build-arg", f"BASE_IMAGE={kube_nodes.BASE_IMAGE}", "--target", "trainmaster", str(_ROOT),
        )  # fmt: skip
        yield OwnImage(registry=made)
    finally:
        containers.end_podman(folder)


def _mounts() -> list[str]:
    return [word for place in kube_nodes.python_folders() for word in ("--volume", f"{place}:{place}:ro")]

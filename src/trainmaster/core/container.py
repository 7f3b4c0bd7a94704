"""Container of a job: image, engine, registry login. The password is a reference, never a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.errors import Fault
from trainmaster.core.schema import field

SECRETS_FOLDER = "secrets"  # in the attempt's folder: files that the agent reads once and removes
RUN_SCRIPT = "scripts/run_docker_job.sh"  # in the working folder
FOLDERS = ("data", "configs", "scripts")  # of the working folder, there when a container starts


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLogin:
    """Login at the registry of the image."""

    user: str = field(pattern=r"[^\s:]+", example="alice", doc="user name")
    password_from: str = field(
        pattern=r"[A-Za-z_][A-Za-z0-9_]{0,127}",
        example="REGISTRY_PASSWORD",
        doc="variable of the server's environment that holds the password; it must be named in TRAINMASTER_JOB_ENV",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Image that the ranks run in, one container for each. The job's folders have the same paths inside."""

    image: str = field(
        pattern=r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}",
        example="registry.example.org/team/train:1",
        doc="image, with its registry and its tag or digest",
    )
    engine: Literal["auto", "docker", "podman"] = field(
        default="auto", doc="program on the node; auto: docker, else podman"
    )
    login: RegistryLogin | None = field(default=None, doc="login before the pull; not stated: none")
    pull: Literal["always", "missing"] = field(default="always", doc="when the image is pulled")
    gpus: Literal["auto", "all", "none"] = field(default="auto", doc="auto: all, on a node that has NVIDIA GPUs")
    options: tuple[str, ...] = field(default=(), doc="further words of `docker run`, for example [--shm-size=16g]")

    @property
    def registry(self) -> str:
        """Host of the image's registry, as `docker login` takes it."""
        first, slash, _ = self.image.partition("/")
        return first if slash and (":" in first or "." in first or first == "localhost") else "docker.io"

    def faults(self) -> Iterator[Fault]:
        for number, word in enumerate(self.options):
            if not word.startswith("-") and number == 0:
                yield Fault(
                    path=f"options[{number}]", message=f"{word!r:.80} is no option; write for example --shm-size=16g"
                )

"""Notification channels beside webhooks: Slack, e-mail and whatever apprise supports, by names in the server's config.

    HOME/notify.yaml, readable by its owner alone, because the URL of a channel is a secret:

        link: https://trainmaster.example.org      # put before the paths in messages; not stated: none
        allow_hosts: [hooks.internal]              # webhooks may go there whatever its address, and without TLS
        channels:
          ops:
            url: slack://TokenA/TokenB/TokenC
            topics: [job.failed, job.stalled]      # not stated: all
            projects: [llama]                      # not stated: all

    TRAINMASTER_NOTIFY_OPS=slack://…               the same from the environment, for all topics and projects

Rows hold the name of a channel and never its URL.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.schema import build, field

FILE = "notify.yaml"
VARIABLE = "TRAINMASTER_NOTIFY_"
TOPICS = (
    "job.started", "job.completed", "job.failed", "job.cancelled", "job.stalled", "job.retried",
    "budget.warning", "budget.exceeded", "instance.leaked",
)  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)  # no slots: a dataclass with them cannot leave its URL out of its own text
class Channel:
    """One way to people. Its URL is never shown, so it has no place in a message or a log."""

    url: str = field(doc="as apprise takes it")
    topics: tuple[str, ...] = field(default=(), doc="of these only")
    projects: tuple[str, ...] = field(default=(), doc="of these only")

    def __repr__(self) -> str:
        return f"Channel(topics={self.topics}, projects={self.projects})"

    def wants(self, topic: str, project: str) -> bool:
        return (not self.topics or topic in self.topics) and (not self.projects or project in self.projects)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the server's own file and environment say of telling people."""

    channels: dict[str, Channel] = field(factory=dict, doc="by name")
    link: str = field(default="", doc="before the paths in messages")
    allow_hosts: tuple[str, ...] = field(default=(), doc="for webhooks")


def load(home: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """The channels of this server; UsageError where the file may not be used as it is."""
    path = home / FILE
    config = Config()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise UsageError(f"{path}: others may read it (mode {mode:04o}), and it holds secrets; chmod 600 it")
            config = _parse(path, file)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    for name, channel in config.channels.items():
        unknown = sorted(set(channel.topics) - set(TOPICS))
        if unknown:
            raise UsageError(f"{path}: channels.{name}.topics: {unknown[0]!r} is not one of {', '.join(TOPICS)}")
        if name.startswith("webhook:"):
            raise UsageError(f"{path}: channels.{name}: a name that begins with `webhook:` is a webhook's")
    from_environment = {
        name.removeprefix(VARIABLE).lower(): Channel(url=url)
        for name, url in environment.items()
        if name.startswith(VARIABLE) and name != VARIABLE and url
    }
    return Config(
        channels={**config.channels, **from_environment}, link=config.link.rstrip("/"), allow_hosts=config.allow_hosts
    )


def _parse(path: Path, file: BinaryIO) -> Config:
    from trainmaster.documents import yaml_file

    try:
        document = yaml_file.parse(file.read(yaml_file.MAX_BYTES + 1), str(path))
    except SpecError as error:
        # The message may quote a value, and that may be the URL of a channel.
        raise UsageError(f"{error.faults[0].path}: not YAML, or a key is written twice") from None
    return document.read(lambda value: build(Config, value))


class Watched:
    """The config as the file says it now. An invalid one is logged once, and the last good one stays."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._seen: object = ()
        self.config = Config()

    def read(self) -> Config:
        try:
            facts = (self._home / FILE).stat()
            now: object = (facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_mode)
        except OSError:
            now = None
        if now != self._seen:
            self._seen = now
            try:
                self.config = load(self._home)
            except UsageError as error:
                log.error("the server's notification channels cannot be used: %s", error)
        return self.config

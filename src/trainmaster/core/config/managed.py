"""Managed tiered checkpointing of SageMaker HyperPod: checkpoints kept by the cluster's own memory daemon and in S3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.core.errors import Fault
from trainmaster.core.schema import YEAR_S, field

# The library allows these characters; it adds nothing of its own, we add the number of ranks.
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_BUCKET = re.compile(r"s3://[^/@?#:\s]+(/[^?#\s]*)?")
_ADDRESS = re.compile(r"https?://[^/@?#\s]+/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedConfig:
    """Takes the place of the other tiers: every save goes to the daemon's memory, some to S3 as well."""

    namespace: str = field(example="llama-7", doc="the run's name there; another run needs another")
    s3: str = field(example="s3://bucket/checkpoints", doc="what outlives the daemon; credentials in the environment")
    s3_every_steps: int | None = field(
        default=None, ge=1, doc="steps between saves to S3, of those to memory (every_steps); not stated: each of these"
    )
    daemon: str | None = field(
        default=None, example="http://127.0.0.1:9200", doc="the daemon; not stated: where HyperPod has it"
    )
    timeout_s: float = field(default=60.0, gt=0, le=YEAR_S, doc="one request to the daemon")

    def faults(self) -> Iterator[Fault]:
        if not _NAMESPACE.fullmatch(self.namespace):
            yield Fault(path="namespace", message="letters, digits, - and _, at most 100 of them")
        if not _BUCKET.fullmatch(self.s3):
            # Without repeating it: what is wrong with it may be a password.
            yield Fault(path="s3", message="write s3://bucket/prefix; credentials and endpoint go into the environment")
        if self.daemon is not None and not _ADDRESS.fullmatch(self.daemon):
            yield Fault(path="daemon", message="write http://host:port")

"""Commands of Slurm and Kubernetes that drain and resume a node, as argument lists, and parsers of their answers.

Pure: `parse` turns an answer into a `DrainState`; cluster/remedy/drain.py runs the commands.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from trainmaster.cluster.remedy.remedy import PREFIX
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.targets.slurm.settings import SlurmSettings

KEY = "trainmaster/health"  # taint and label
WHY = "trainmaster/reason"  # annotation: a label value cannot hold a sentence

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainState:
    """Whether the scheduler keeps work from a node, and its stated reason."""

    out: bool
    reason: str
    at: str = field(default="", compare=False)  # ISO, when the reason was set; empty where it is not told

    @property
    def ours(self) -> bool:
        return self.out and self.reason.startswith(PREFIX)


class Scheduler(Protocol):
    def drain(self, node: str, reason: str) -> list[Command]: ...

    def resume(self, node: str) -> list[Command]: ...

    def ask(self, node: str) -> Command: ...

    def parse(self, node: str, answer: str) -> DrainState: ...


class Slurm:
    """scontrol. A drained node finishes its jobs and gets no new one."""

    def __init__(self, settings: SlurmSettings | None = None) -> None:
        self.settings = settings  # of a cluster file; None: scontrol of this machine

    def drain(self, node: str, reason: str) -> list[Command]:
        return [("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")]

    def resume(self, node: str) -> list[Command]:
        return [("scontrol", "update", f"nodename={node}", "state=resume")]

    def ask(self, node: str) -> Command:
        return ("scontrol", "show", "node", node, "--oneliner")

    def parse(self, node: str, answer: str) -> DrainState:
        if len(re.findall(r"^NodeName=", answer, flags=re.MULTILINE)) != 1 or f"NodeName={node} " not in answer:
            raise TargetError(f"scontrol does not describe exactly the node {node}: {answer.strip()[:200]!r}")
        state = re.search(r"\bState=(\S+)", answer)
        if state is None:
            raise TargetError(f"scontrol shows no state for {node}")
        # IDLE+DRAIN, MIXED+DRAIN, DOWN*+DRAIN. FAIL and DOWN are the scheduler's own states, never changed here.
        out = "DRAIN" in re.split(r"[+*~#!%$@^-]", state[1])
        # The reason ends with its author and time: `trainmaster: … [root@2026-03-01T12:00:00]`.
        reason = re.search(r"\bReason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*(?: Comment=.*)?$", answer.strip())
        # The time that a job has put into its reason counts before Slurm's: a retest drains the node again.
        at = _moment(re.search(r" \(since ([0-9T:+-]+)\)", answer)) or _moment(
            re.search(r" \[[^\[\]]*@([0-9T:-]+)\]", answer)
        )
        return DrainState(out=out, reason=reason[1] if reason and out else "", at=at)

    def ask_all(self) -> Command:
        return ("scontrol", "show", "node", "--oneliner")

    def parse_all(self, answer: str) -> dict[str, DrainState]:
        """State of every node that is described."""
        lines = [(re.match(r"NodeName=(\S+) ", line), line) for line in answer.splitlines()]
        return {name[1]: self.parse(name[1], line) for name, line in lines if name is not None}


def _moment(found: re.Match[str] | None) -> str:
    """The time in a reason as ISO; empty where somebody has written something else, as `(since 2024)`."""
    try:
        return datetime.fromisoformat(found[1]).astimezone().isoformat() if found else ""
    except (ValueError, OverflowError):
        return ""


class Kubernetes:
    """kubectl. Cordoned, tainted and labelled; pods that run stay until they end."""

    def drain(self, node: str, reason: str) -> list[Command]:
        return [
            # The reason first: a drained node without it would look like somebody else's.
            ("kubectl", "annotate", "node", node, f"{WHY}={reason}", "--overwrite"),
            ("kubectl", "cordon", node),
            ("kubectl", "taint", "node", node, f"{KEY}=fail:NoSchedule", "--overwrite"),
            ("kubectl", "label", "node", node, f"{KEY}=fail", "--overwrite"),
        ]

    def resume(self, node: str) -> list[Command]:
        return [
            ("kubectl", "taint", "node", node, f"{KEY}:NoSchedule-"),
            ("kubectl", "label", "node", node, f"{KEY}-"),
            ("kubectl", "uncordon", node),
            ("kubectl", "annotate", "node", node, f"{WHY}-"),
        ]

    def ask(self, node: str) -> Command:
        return ("kubectl", "get", "node", node, "--output=json")

    def parse(self, node: str, answer: str) -> DrainState:
        try:
            found = json.loads(answer)
            metadata, spec = found["metadata"], found["spec"]
            if metadata["name"] != node:
                raise TargetError(f"kubectl describes {metadata['name']!r:.80} instead of {node}")
            reason = (metadata.get("annotations") or {}).get(WHY, "")
            return DrainState(out=spec.get("unschedulable") is True, reason=str(reason))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TargetError(f"kubectl does not describe the node {node}: {answer.strip()[:200]!r}") from None


NAMES = ("slurm", "kubernetes")
_INSTEAD = {
    "local": "it has no scheduler that could drain this machine",
    "ssh": "name the one that runs on these hosts, or leave the bad ones out of the hosts file",
    "hyperpod": "its nodes are nodes of Kubernetes: use --on kubernetes",
    "sagemaker": "its machines are SageMaker's, a new job gets others: report the bad ones to AWS support",
    "lambda": "return the machine with `trainmaster reap`; its GPUs are remembered as bad",
    "pool": "leave the machine out of the pool file",
}


def load(word: str) -> Scheduler:
    """The scheduler that a target stands for: `slurm`, `slurm:FILE` or `kubernetes`. UsageError for any other."""
    name, _, options = word.partition(":")
    if name == "slurm":
        return Slurm(_settings(word) if options else None)
    if name == "kubernetes" and not options:
        return Kubernetes()
    if name == "kubernetes":
        raise UsageError(
            f"--on {word}: write --on kubernetes; kubectl's current context decides which cluster is meant"
        )
    if name in _INSTEAD:
        raise UsageError(f"--on {word}: nodes are drained by slurm or kubernetes; {_INSTEAD[name]}")
    raise UsageError(f"--on {word}: {name!r} is no scheduler; use one of {', '.join(NAMES)}")


def _settings(word: str) -> SlurmSettings:
    from trainmaster import targets
    from trainmaster.targets.slurm.target import Slurm as Target

    target = targets.load(word)
    assert isinstance(target, Target)
    return target.settings

"""Names, labels and annotations of everything that the target creates, and the fixed paths in its pods."""

from __future__ import annotations

import re

from trainmaster.core.errors import TargetError
from trainmaster.core.ids import UUID_PATTERN
from trainmaster.targets._runs import Owner

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "trainmaster"  # value of MANAGED_BY, and field manager of server-side apply
ATTEMPT_LABEL = "trainmaster/attempt"
JOB_NAME_LABEL = "trainmaster/job-name"  # the spec's name
NODE_LABEL = "trainmaster/node"  # number of the node, of an attempt each of whose nodes is a Job
HOME_LABEL, RUN_LABEL = "trainmaster/home", "trainmaster/run"  # who made what no job of a database owns
HEALTH_TAINT = "trainmaster/health"  # taint and label of a node that `trainmaster remedy` has drained
STOP_ANNOTATION = "trainmaster/stop"  # of a pod: asks its agent to stop; the value is the reason
RESEND_ANNOTATION = "trainmaster/resend"  # of a pod: asks for lines again, `STREAM OFFSET`
SELECTOR = f"{MANAGED_BY}={MANAGER}"

# Set in the pods for agent/pod.py.
MASTER_PORT = 29500
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"  # as Kubernetes sets it for indexed Jobs

PLAN_FOLDER = "/trainmaster/plan"
PACKAGE_FOLDER = "/trainmaster/package"
ASK_FOLDER = "/trainmaster/ask"
RUN_FOLDER = "/trainmaster/run"

_ATTEMPT = re.compile(rf"({UUID_PATTERN})\.([0-9]{{1,6}})")


def object_name(attempt: str) -> str:
    """Name of the objects of an attempt: at most 43 characters, so that operators can add theirs."""
    match = _ATTEMPT.fullmatch(attempt)
    if match is None:
        raise TargetError(f"{attempt[:80]!r} is not the name of an attempt")
    return f"tm-{match[1].replace('-', '')}-{match[3]}"


def node_name(name: str, node: int) -> str:
    """Name of the Job of one node, where each has its own; the first has the attempt's."""
    return f"{name}-{node}" if node else name


def owner_labels(owner: Owner) -> dict[str, str]:
    """Labels of everything that a run makes."""
    return {HOME_LABEL: owner.home, RUN_LABEL: owner.run}


def job_of(attempt: str) -> str:
    """Id of the job that an attempt belongs to."""
    return attempt.partition(".")[0]


def label_text(text: str) -> str:
    """A text as the value of a label: at most 63 letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-._")

"""Traps in manifests of training jobs: accepted by the API server, and wrong when they run.

`find_traps` takes a manifest, made here or edited by hand. Each fault has the path in the manifest and the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainmaster.core.errors import Fault
from trainmaster.core.heartbeat import Beat, prefix, words
from trainmaster.core.secret.in_spec import is_secret
from trainmaster.core.secret.shapes import recognise
from trainmaster.targets.kubernetes.kueue import QUEUE_LABEL

Manifest = Mapping[str, Any]

_OPERATORS = ("gt", "gteq", "lt", "lteq", "eq")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_RULE_NUMBERS = (
    "expectedStartCutOffInSeconds",
    "expectedRecurringFrequencyInSeconds",
    "metricThreshold",
    "metricEvaluationDataPoints",
)


def find_traps(manifest: Manifest) -> Iterator[Fault]:
    """Every trap in one object."""
    kind = manifest.get("kind")
    for path, pod in _pods(manifest):
        yield from _pod_traps(path, pod, str(kind))
    if kind == "HyperPodPyTorchJob":
        yield from _hyperpod_traps(manifest)
    if kind == "PyTorchJob":
        yield from _pytorchjob_traps(manifest)
    if kind == "TrainJob":
        yield from _trainjob_traps(manifest)
    for name, value in _mapping(manifest, "metadata", "annotations").items():
        if not isinstance(value, str):
            message = f'annotations are text; write "{str(value).lower()}" in quotes, or the whole object is refused'
            yield Fault(path=f"metadata.annotations.{name}", message=message)


def _pods(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Pod specs of a job of any kind, with their paths."""
    spec = _mapping(manifest, "spec")
    if pod := _mapping(spec, "template", "spec"):
        yield "spec.template.spec", pod
    for name, replica in _mapping(spec, "pytorchReplicaSpecs").items():
        yield f"spec.pytorchReplicaSpecs.{name}.template.spec", _mapping(replica, "template", "spec")
    for number, replica in enumerate(_list(spec, "replicaSpecs")):
        yield f"spec.replicaSpecs[{number}].template.spec", _mapping(replica, "template", "spec")


def _pod_traps(path: str, pod: Manifest, kind: str) -> Iterator[Fault]:
    for number, container in enumerate(_list(pod, "containers")):
        where = f"{path}.containers[{number}]"
        yield from _environment_traps(where, container, kind)
        yield from _device_traps(where, container)
        if kind in ("PyTorchJob", "HyperPodPyTorchJob") and _hyperpodrun(container):
            yield from _launcher_traps(where, container, pod)
    names = [container.get("name") for container in _list(pod, "containers")]
    if kind == "PyTorchJob" and "pytorch" not in names:
        message = "the operator looks for a container named `pytorch`, and sets no environment in any other"
        yield Fault(path=f"{path}.containers", message=message)
    if not any(_mapping(volume, "emptyDir").get("medium") == "Memory" for volume in _list(pod, "volumes")):
        message = (
            "no emptyDir with medium Memory for /dev/shm: the runtime's 64 MiB are too small for data loaders and NCCL"
        )
        yield Fault(path=f"{path}.volumes", message=message)


def _environment_traps(where: str, container: Manifest, kind: str) -> Iterator[Fault]:
    for number, variable in enumerate(_list(container, "env")):
        name, value = str(variable.get("name", "")), variable.get("value")
        place = f"{where}.env[{number}]"
        if isinstance(value, str) and (recognise(value) or is_secret(name, value)):
            yield Fault(
                path=place, message=f"{name} is a secret in clear text; put it into a Secret and use secretKeyRef"
            )
        elif value is not None and not isinstance(value, str):
            yield Fault(path=place, message=f'{name} is not text; write "{value}" in quotes')
        if kind == "PyTorchJob" and name in _RENDEZVOUS:
            message = f"{name} is set by the operator, and counts pods there, not processes; leave it out"
            yield Fault(path=place, message=message)


def _device_traps(where: str, container: Manifest) -> Iterator[Fault]:
    limits, requests = _mapping(container, "resources", "limits"), _mapping(container, "resources", "requests")
    for name in sorted({*limits, *requests}):
        if "/" in name and str(limits.get(name)) != str(requests.get(name, limits.get(name))):
            message = f"requests {requests.get(name)} and limits {limits.get(name)}; devices need equal values"
            yield Fault(path=f"{where}.resources.{name}", message=message)


def _launcher_traps(where: str, container: Manifest, pod: Manifest) -> Iterator[Fault]:
    """Options of `hyperpodrun`."""
    options, place = _options(_hyperpodrun(container)), f"{where}.command"
    if options.get("shutdown-signal", "SIGKILL") != "SIGTERM":
        message = "hyperpodrun kills with SIGKILL and no checkpoint is saved; write --shutdown-signal=SIGTERM"
        yield Fault(path=place, message=message)
    timeout = options.get("shutdown-timeout", "15")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if timeout.isdecimal() and isinstance(grace, int) and int(timeout) >= grace:
        message = (
            f"--shutdown-timeout={timeout} is not below terminationGracePeriodSeconds {grace}: the kubelet kills first"
        )
        yield Fault(path=place, message=message)
    if ":" in options.get("nnodes", ""):
        message = (
            f"--nnodes={options['nnodes']}: hyperpodrun takes one number of nodes; elastic sizes go into elasticPolicy"
        )
        yield Fault(path=place, message=message)
    if "log-dir" not in options or not {"tee", "redirects"} & options.keys():
        message = "without --log-dir and --tee no file has the ranks' output, and log rules find every job hanging"
        yield Fault(path=place, message=message)
    for name in ("rdzv-backend", "rdzv-endpoint", "master-addr", "master-port", "node-rank"):
        if name in options:
            yield Fault(path=place, message=f"--{name} is ignored: the operator starts the rendezvous; leave it out")


def _hyperpod_traps(manifest: Manifest) -> Iterator[Fault]:
    spec = _mapping(manifest, "spec")
    count = spec.get("nprocPerNode")
    if count is not None and not isinstance(count, str):
        yield Fault(path="spec.nprocPerNode", message=f'is text in this kind; write "{count}" in quotes')
    queue = QUEUE_LABEL in _mapping(manifest, "metadata", "labels")
    for number, replica in enumerate(_list(spec, "replicaSpecs")):
        if replica.get("spares") and not queue:
            message = f"spare pods are only kept by Kueue; add the label {QUEUE_LABEL}"
            yield Fault(path=f"spec.replicaSpecs[{number}].spares", message=message)
    elastic = _mapping(spec, "elasticPolicy")
    if "replicaIncrementStep" in elastic and "replicaDiscreteValues" in elastic:
        message = "write one of replicaIncrementStep and replicaDiscreteValues"
        yield Fault(path="spec.elasticPolicy", message=message)
    policy = _mapping(spec, "runPolicy")
    for number, rule in enumerate(_list(policy, "logMonitoringConfiguration")):
        yield from _rule_traps(f"spec.runPolicy.logMonitoringConfiguration[{number}]", rule)


def _rule_traps(path: str, rule: Manifest) -> Iterator[Fault]:
    """A log rule as HyperPod's agent reads it: `re.match` at the start of a line, `int` for every number."""
    for name in _RULE_NUMBERS:
        value = rule.get(name)
        if value is not None and not (isinstance(value, int) or (isinstance(value, str) and value.isdecimal())):
            message = f"{value!r} is no whole number: the agent drops all rules of the job without a word"
            yield Fault(path=f"{path}.{name}", message=message)
    flag = rule.get("faultOnMatch")
    if flag is not None and not isinstance(flag, bool):
        yield Fault(path=f"{path}.faultOnMatch", message=f"{flag!r} is text, and any text is true; write true or false")
    if (rule.get("metricThreshold") is None) != (rule.get("operator") is None):
        yield Fault(path=path, message="metricThreshold and operator belong together; one alone is ignored")
    if rule.get("operator") is not None and rule["operator"] not in _OPERATORS:
        message = f"{rule['operator']!r} is not one of {', '.join(_OPERATORS)}: the agent drops all rules of the job"
        yield Fault(path=f"{path}.operator", message=message)
    yield from _pattern_traps(path, rule)


def _pattern_traps(path: str, rule: Manifest) -> Iterator[Fault]:
    for name in ("logPattern", "stopPattern"):
        text = rule.get(name)
        try:
            pattern = re.compile(text) if isinstance(text, str) else None
        except re.error as error:
            message = f"not a regular expression ({error}): the agent drops all rules of the job"
            yield Fault(path=f"{path}.{name}", message=message)
            continue
        if name == "stopPattern" or pattern is None:
            continue
        if rule.get("metricThreshold") is not None and not pattern.groups:
            yield Fault(path=f"{path}.{name}", message="a threshold needs a group with the number in the pattern")
        if "heartbeat" in pattern.pattern and not any(pattern.match(_line(loss)) for loss in (2.5, math.nan)):
            message = "matches no heartbeat of the trainer from the start of its line; print rules that do with: "
            yield Fault(path=f"{path}.{name}", message=message + "trainmaster cluster hyperpod-rules")
        number = r"(loss|grad_norm)=\([^)]*\\d"
        if re.search(number, pattern.pattern) and rule.get("metricThreshold") is not None:
            message = "NaN does not match digits: a diverged run looks silent; use a rule with faultOnMatch for it"
            yield Fault(path=f"{path}.{name}", message=message)


def _pytorchjob_traps(manifest: Manifest) -> Iterator[Fault]:
    replicas = _mapping(manifest, "spec", "pytorchReplicaSpecs")
    elastic = _mapping(manifest, "spec", "elasticPolicy")
    if "Master" not in replicas and not elastic:
        message = "without a Master, and without elasticPolicy, no pod gets MASTER_ADDR"
        yield Fault(path="spec.pytorchReplicaSpecs", message=message)
    annotations = _mapping(manifest, "metadata", "annotations")
    enabled = annotations.get("sagemaker.amazonaws.com/enable-job-auto-resume") == "true"
    for name, replica in replicas.items():
        if enabled and _mapping(replica).get("restartPolicy") == "Never":
            message = "auto-resume restarts pods, and Never keeps them ended; write OnFailure"
            yield Fault(path=f"spec.pytorchReplicaSpecs.{name}.restartPolicy", message=message)


def _trainjob_traps(manifest: Manifest) -> Iterator[Fault]:
    for number, variable in enumerate(_list(_mapping(manifest, "spec", "trainer"), "env")):
        name, value = str(variable.get("name", "")), variable.get("value")
        if name.startswith("PET_"):
            message = f"{name} is set by the trainer's controller, and a job that sets it is refused; leave it out"
            yield Fault(path=f"spec.trainer.env[{number}]", message=message)
        if isinstance(value, str) and (recognise(value) or is_secret(name, value)):
            message = f"{name} is a secret in clear text; put it into a Secret and use secretKeyRef"
            yield Fault(path=f"spec.trainer.env[{number}]", message=message)


def _hyperpodrun(container: Manifest) -> list[str]:
    """Words from `hyperpodrun` on, also inside `sh -c`; empty where it is not used."""
    given = [str(word) for name in ("command", "args") for word in _list_of(container.get(name))]
    words = [word for text in given for word in (text.split() if " " in text else [text])]
    for number, word in enumerate(words):
        if word.rpartition("/")[2] == "hyperpodrun":
            return words[number:]
    return []


def _options(given: Sequence[str]) -> dict[str, str]:
    """Options of a launcher up to its program; `_` and `-` in their names are the same to it."""
    options: dict[str, str] = {}
    number = 1
    while number < len(given) and given[number].startswith("-"):
        name, equals, value = given[number].lstrip("-").partition("=")
        if name in ("m", "no-python", "no_python"):
            break
        if not equals and number + 1 < len(given) and not given[number + 1].startswith("-"):
            number += 1
            value = given[number]
        options[{"r": "redirects", "t": "tee"}.get(name, name).replace("_", "-")] = value
        number += 1
    return options


def _mapping(value: object, *path: str) -> Mapping[str, Any]:
    """A mapping inside others; empty where a step of the path is missing or no mapping."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _list(value: Manifest, name: str) -> list[Mapping[str, Any]]:
    return [item for item in _list_of(value.get(name)) if isinstance(item, Mapping)]


def _list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _line(loss: float) -> str:
    """A heartbeat of the trainer."""
    beat = Beat(rank=0, node=0, step=1, steps=2, loss=loss, grad_norm=1.0, tokens_per_s=1000.5, step_s=0.5, at="train")
    return prefix(0, 0, at=datetime(2026, 1, 1, tzinfo=UTC)) + words(beat)

"""Profiles: GPU models (core/gpus.py), instance types (data/instances.toml), and detection of the instance type.

Facts of a GPU model hold for every GPU of that name, so a check looks them up itself (`of_gpu`). Facts of an instance
must be stated (`--expect ml.p5.48xlarge`) or detected (`resolve`), because the same GPUs are sold in many machines. Of
a detected instance only those facts are used that a container or a launch cannot have changed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trainmaster.core.compat import read_toml
from trainmaster.core.errors import Fault, HostError, SpecError
from trainmaster.core.expect import Expect, build_expect, parse_word
from trainmaster.core.gpus import GpuModel, find_gpu, gpus, of_gpu, why_unsupported
from trainmaster.core.results import CheckResult
from trainmaster.core.schema import build
from trainmaster.node.host import Host

__all__ = [
    "Resolved",
    "find_instance",
    "gpus",
    "instances",
    "is_model",
    "model_of",
    "of_gpu",
    "parse_document",
    "resolve",
]

# nvidia-smi shows at least 92 % of the stated memory (T4: 14.75 of 16), a kernel at least 95 % of a machine's RAM.
MEMORY_SHARE = 0.9
RAM_SHARE = 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance type of a cloud."""

    name: str
    gpu: str  # a GpuModel's name
    gpus: int
    efa_devices: int
    vcpus: int
    ram_gib: float
    source: str
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Expectation of a run, and its profile: stated, else detected, else None."""

    expect: Expect
    profile: str | None


def resolve(words: Sequence[str | Mapping[str, object]], host: Host | None = None) -> Resolved:
    """`--expect` words in order, later ones win: a profile's name, name=value, or a whole mapping (a YAML file).

    A mapping may name a profile too (`profile: ml.p5.48xlarge`). With a host, its detected instance type comes first.
    """
    instance = detect(host) if host is not None else None
    profile = instance.name if instance is not None else None
    mapping = _trusted(instance, host) if instance is not None and host is not None else {}
    faults: list[Fault] = []
    for word in words:
        try:
            named, facts = _facts(word)
        except SpecError as error:
            faults.extend(error.faults)
            continue
        profile = named or profile
        mapping.update(facts)
    return Resolved(expect=build_expect(mapping, faults), profile=profile)


def parse_document(value: object) -> Mapping[str, object]:
    """Expectation file of a site: fields of Expect, and `profile` as their base."""
    if not isinstance(value, Mapping):
        raise SpecError([Fault(path="", message="write fields such as `gpus: 8`, and `profile: ml.p5.48xlarge`")])
    name, _ = value.get("profile"), build(Expect, {key: item for key, item in value.items() if key != "profile"})
    if name is not None and find_instance(str(name)) is None and find_gpu(str(name)) is None:
        raise SpecError([Fault(path="profile", message=_unknown(str(name)))])
    return value


def model_of(results: Sequence[CheckResult]) -> str | None:
    """GPU model of a run, if it is in the table and all GPUs have it."""
    names = [
        finding.values.get("model") for result in results if result.check == "gpu_model" for finding in result.findings
    ]
    models = {of_gpu(str(name)) for name in names if name is not None}
    (only,) = models if len(models) == 1 else (None,)
    return only.name if only is not None else None


def detect(host: Host) -> Instance | None:
    """Instance type of this machine; None if it is not in the table."""
    sources = (
        functools.partial(host.env, "SM_CURRENT_INSTANCE_TYPE"),  # SageMaker training jobs
        functools.partial(host.read, "/sys/class/dmi/id/product_name"),  # EC2 writes the type there
    )
    for read_name in sources:
        with contextlib.suppress(HostError):
            instance = find_instance(read_name() or "")
            if instance is not None:
                return instance
    return None


def find_instance(name: str) -> Instance | None:
    """Instance type by name, with or without SageMaker's `ml.`."""
    return instances().get(name.strip().lower().removeprefix("ml."))


def is_model(product: str, wanted: str) -> bool:
    """Whether a GPU's product name is the wanted model: a profile's name, or whole words of the product name."""
    model = find_gpu(wanted)
    if model is not None and of_gpu(product) is model:
        return True
    return re.search(rf"(?<![a-z0-9]){re.escape(wanted.strip().lower())}(?![a-z0-9])", product.lower()) is not None


@functools.cache
def instances() -> Mapping[str, Instance]:
    """Every instance type of data/instances.toml."""
    document = _load("instances.toml")
    sources = document["source"]
    return {
        name: Instance(
            **{**row, "name": name, "source": "; ".join(sources[word] for word in row["source"].split("; "))}
        )
        for name, row in document["instance"].items()
    }


def _load(name: str) -> dict[str, Any]:
    return read_toml((resources.files("trainmaster.checks") / "data" / name).read_text(encoding="utf-8"))


def _facts(word: str | Mapping[str, object]) -> tuple[str | None, dict[str, object]]:
    """Fields that one word of `--expect` states, and the profile it names."""
    if isinstance(word, str) and "=" in word:
        return None, dict([parse_word(word)])
    name = word if isinstance(word, str) else word.get("profile")
    own = {} if isinstance(word, str) else {key: value for key, value in word.items() if key != "profile"}
    if name is None:
        return None, own
    return str(name), {**_stated(str(name)), **own}


def _stated(name: str) -> dict[str, object]:
    """Fields of a named profile: all of its facts."""
    instance = find_instance(name)
    if instance is not None:
        return {
            **_of_model(gpus()[instance.gpu]),
            "gpus": instance.gpus,
            "efa_devices": _efa_devices(name, instance),
            "cpus": instance.vcpus,
            "ram_gib": round(instance.ram_gib * RAM_SHARE, 1),
        }
    model = find_gpu(name)
    if model is None:
        raise SpecError([Fault(path=f"--expect {name}", message=_unknown(name))])
    return _of_model(model)


def _efa_devices(name: str, instance: Instance) -> int:
    """EFA devices of a named instance. SageMaker attaches none to most of the types that must ask for one."""
    if not name.strip().lower().startswith("ml."):
        return instance.efa_devices
    rule = _load("instances.toml")["sagemaker"]
    on_request = instance.name.partition(".")[0] in rule["efa_on_request"]
    return instance.efa_devices if not on_request or instance.name in rule["efa"] else 0


def _of_model(model: GpuModel) -> dict[str, object]:
    return {"gpu_model": model.name, "gpu_memory_gib": round(model.memory_gb * MEMORY_SHARE, 1)}


def _trusted(instance: Instance, host: Host) -> dict[str, object]:
    """Fields of a detected instance. Not CPUs, memory or EFA: a container or a launch may have fewer."""
    try:
        granted = host.env("NVIDIA_VISIBLE_DEVICES")
    except HostError:
        granted = None
    model: dict[str, object] = {"gpu_model": instance.gpu}
    return model if granted not in (None, "", "all") else {**model, "gpus": instance.gpus}


def _unknown(name: str) -> str:
    known = [*gpus(), *instances(), *(f"ml.{name}" for name in instances())]
    if (why := why_unsupported(name)) is not None:
        return f"{name} is not supported: {why}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "write an instance (ml.p5.48xlarge), a GPU (H200) or name=value"
    return f"there is no profile of that name; {hint}"

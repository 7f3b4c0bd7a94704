"""Inputs of a job that lie in an object store, brought to the machines that run it: data/, configs/ and scripts/.

The machines pull them through signed addresses; no byte passes through the server. A storage without signed addresses
(a folder) is relayed. Inputs with an absolute path are on the machines already.

A spec may name a path in the server's storage, though none of other jobs; and a URL below one of the prefixes that the
operator lists in TRAINMASTER_INPUTS (`s3://datasets/public,s3://team`): the server signs with its own credentials.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainmaster.core.errors import Fault, NoSignedUrls, SpecError, UsageError
from trainmaster.core.plan import WORK_FOLDER
from trainmaster.core.spec import JobSpec
from trainmaster.storage import Store, open_store
from trainmaster.targets import FetchesInputs, Pull, Target

ALLOWED_VARIABLE = "TRAINMASTER_INPUTS"
FOLDERS = {"train": "data", "eval": "data", "config": "configs", "script": "scripts"}
_VALID_S = 6 * 3600  # of a signed address: a pull of a terabyte takes hours
_OF_JOB = "this belongs to a job; copy it to a place of its own in the storage"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def refuse_unserved(spec: JobSpec, target: Target) -> None:
    """SpecError where inputs belong to a job, or have to be brought to the machines and the target does not do that."""
    brought = _find_brought(spec)
    faults = [Fault(path=f"inputs.{name}", message=_OF_JOB) for name, place in brought.items() if _is_of_job(place)]
    if not isinstance(target, FetchesInputs):
        message = f"{spec.target} brings no inputs to its machines; write an absolute path that they have"
        faults += [Fault(path=f"inputs.{name}", message=message) for name in brought]
    if faults:
        raise SpecError(faults)


def _find_brought(spec: JobSpec) -> dict[str, str]:
    """Inputs that the machines do not have already, by field."""
    return {name: place for name in FOLDERS if (place := getattr(spec.inputs, name)) and not place.startswith("/")}


def _is_of_job(place: str) -> bool:
    """Whether a path in the storage, however it is spelled, is of what jobs left or projects uploaded."""
    parts = [part for part in place.split("/") if part not in ("", ".")]
    return "://" not in place and bool(parts) and parts[0].casefold() in ("jobs", "workdirs")


def find_pulls(spec: JobSpec, storage: Store) -> tuple[Pull, ...]:
    """What the machines of a job have to pull; ObjectMissing where one is not there. Asks the storage: in a thread."""
    places = _find_brought(spec)
    names: dict[str, str] = {}
    for name, place in places.items():
        other = names.setdefault(f"{FOLDERS[name]}/{place.rpartition('/')[2]}", name)
        if other != name:
            raise UsageError(f"inputs.{other} and inputs.{name} have the same file name; rename one of them")
    return tuple(_pull(name, place, spec, storage) for name, place in places.items())


def _pull(name: str, place: str, spec: JobSpec, storage: Store) -> Pull:
    store, path = _open(name, place, storage)
    stat = store.stat(path)
    md5 = _MD5.fullmatch(stat.version)
    source, url = None, ""
    try:
        url = store.sign(path, expires_s=_VALID_S)
    except NoSignedUrls:
        source = Path(store.url) / path
    return Pull(
        name=place,
        url=url,
        source=source,
        to=f"{WORK_FOLDER}/{FOLDERS[name]}/{path.rpartition('/')[2]}",
        size_bytes=stat.size_bytes,
        version=stat.version,
        md5=md5[1] if md5 is not None else None,
        sha256=spec.inputs.sha256.get(name),
        mode=0o755 if name == "script" else 0o644,
    )


def _open(name: str, place: str, storage: Store) -> tuple[Store, str]:
    if "://" not in place:
        if _is_of_job(place):
            raise UsageError(f"inputs.{name}: {_OF_JOB}")
        return storage, place
    allowed = [prefix.rstrip("/") for prefix in re.split(r"[,\s]+", os.environ.get(ALLOWED_VARIABLE, "")) if prefix]
    if not any(place.startswith(f"{prefix}/") for prefix in allowed):
        raise UsageError(f"inputs.{name}: the operator has to list {place} or a folder above it in {ALLOWED_VARIABLE}")
    folder, _, path = place.rpartition("/")
    return open_store(folder), path

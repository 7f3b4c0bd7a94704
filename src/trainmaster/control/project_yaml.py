"""The project file of a job: what was asked for and where its data lies, as YAML in storage beside what comes of it.

    job: 6f1c…                       paths:
    name: trial                        train: s3://bucket/datasets/tales/train.jsonl
    project: default                   eval: s3://bucket/datasets/tales/eval.jsonl
    target: local                      config: s3://bucket/jobs/6f1c…/inputs/config.json
    …                                  outputs: s3://bucket/jobs/6f1c…/outputs

It is made of the job's row and the storage's address alone, so that building it again gives the same bytes.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from trainmaster.core.plan import OUTPUTS_FOLDER
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.store.rows import JobRow

PROJECT_FILE = "project.yaml"
CONFIG_FILE = "inputs/config.json"
_VERSION = 1


def prefix(job_id: str) -> str:
    """Where everything of a job is kept."""
    return f"jobs/{job_id}"


def build(job: JobRow, storage_url: str) -> dict[str, str]:
    """The project file and what it names, by path under the job's prefix; the file itself is the last."""
    files: dict[str, str] = {}
    if job.spec.train is not None:
        files[CONFIG_FILE] = json.dumps(to_plain(job.spec.train), indent=2, sort_keys=True) + "\n"
    document = describe(job, storage_url)
    own = {name: value for name, value in document.items() if name not in _ALIKE}
    parts = (json.dumps({name: value}) for name, value in document.items() if name in _ALIKE)
    parts_text = (_dump_alike(text) if len(text) < _SHORT else _dump(json.loads(text)) for text in parts)
    files[PROJECT_FILE] = _dump_own(own, job) + "".join(parts_text)
    return files


def _dump_own(own: dict[str, Any], job: JobRow) -> str:
    """The first parts of the file. Of jobs that differ in id and time alone they differ in these words alone."""
    text, at = json.dumps(own), job.created_at.isoformat()
    told = _ID.fullmatch(job.id) and _TIME.fullmatch(at) and _NO_ID not in text and _NO_TIME not in text
    if len(text) >= _SHORT or not told:
        return _dump(own)
    alike = _dump_alike(text.replace(job.id, _NO_ID).replace(at, _NO_TIME))
    return alike.replace(_NO_ID, job.id).replace(_NO_TIME, at)


# As long as what they stand for, and quoted where that is: YAML takes the one for a word, the other for a time.
_NO_ID, _ID = "00000000-0000-4000-8000-00000000dead", re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NO_TIME = "2000-01-01T00:00:00.000001+00:00"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00")


# The last parts of the file, which many jobs have in common: PyYAML takes milliseconds for them.
_SHORT = 4096  # characters of one that is kept
_ALIKE = ("workload", "resources", "preflight", "limits", "zone", "environment")


@functools.lru_cache(maxsize=256)
def _dump_alike(text: str) -> str:
    return _dump(json.loads(text))


def _dump(document: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))


def describe(job: JobRow, storage_url: str) -> dict[str, Any]:
    """What the project file says, as plain data."""
    spec = job.spec
    return {
        "version": _VERSION,
        "job": job.id,
        "name": spec.name,
        "project": spec.project,
        "target": spec.target,
        "created_at": job.created_at.isoformat(),
        "paths": _paths(job.id, spec, storage_url),
        "workload": _workload(spec),
        "resources": to_plain(spec.resources),
        "preflight": to_plain(spec.preflight),
        "limits": to_plain(spec.limits),
        "zone": spec.zone or "UTC",
        # Only the names: people do put secrets there, and this file is read by more people than the job's row.
        "environment": sorted(spec.env),
    }


def _workload(spec: JobSpec) -> dict[str, Any]:
    if spec.train is not None:
        return {"train": to_plain(spec.train)}
    container = {"container": to_plain(spec.container)} if spec.container is not None else {}
    return {**container, "command": to_plain(spec.command)}


def _paths(job_id: str, spec: JobSpec, storage_url: str) -> dict[str, str | None]:
    own = f"{storage_url}/{prefix(job_id)}"
    if spec.train is not None:
        # Our trainer reads its data from wherever it runs: these paths are the node's, or the Hub's, as they stand.
        data = spec.train.data
        paths = {
            "train": data.path or data.dataset,
            "eval": data.held_out_path or (data.held_out_split and f"{data.dataset}:{data.held_out_split}"),
            "config": f"{own}/{CONFIG_FILE}",
        }
    else:
        inputs = spec.inputs
        paths = {name: locate(getattr(inputs, name), storage_url) for name in ("train", "eval", "config")}
    return {**paths, "project": f"{own}/{PROJECT_FILE}", "outputs": f"{own}/{OUTPUTS_FOLDER}"}


def locate(place: str | None, storage_url: str) -> str | None:
    """The full address of an input: as it stands where it is one, else in the server's storage."""
    if place is None or place.startswith("/") or "://" in place:
        return place
    return f"{storage_url}/{place}"

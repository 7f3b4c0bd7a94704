"""What each field of a spec names, and with whose rights it is opened. A new field without a class fails a test.

The rule: what a token of a project names is opened on the server only where this page says so, and then it is bounded;
everything else is opened by the job itself, as the account of its project.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.core.compat import StrEnum


class Place(StrEnum):
    """Where a named thing is, and whose rights reach it."""

    SERVER = "on the server"  # the control plane looks it up, within the bound that is stated
    NODE = "on the node, as the job's user"
    UPLOADED = "uploaded"  # content that the same project sent before
    ACCOUNT = "at the target, as the project's account"  # partitions, regions, machine types
    NOTHING = "nothing"  # a label or a choice: it is compared and shown, never opened


_SERVER: Mapping[str, str] = {
    "project": "the token must be of this project, or of all",
    "target": "granted to the project (`trainmaster target grant`); a path only from an admin of the server",
    "resume_from": "a job of the same project, at the same target and account",
    "after.jobs": "jobs of the same project, looked up at submission; another project's are unknown",
    "inputs.train": "an absolute path is the node's; else the server's storage outside of `jobs/` and `workdirs/`, or "
    "a URL that the operator lists in TRAINMASTER_INPUTS",
    "inputs.eval": "as inputs.train",
    "inputs.config": "as inputs.train",
    "inputs.script": "as inputs.train",
    "container.login.password_from": "a variable that the operator lists in TRAINMASTER_JOB_ENV for every job",
    "rent.file_systems": "of the provider's account; refused where the target is granted to several projects",
    "train.checkpoint.folder": "written on the node; `fetch` reads it through the server only on `local`, and only "
    "files of the job's own user",
}
_UPLOADED: Mapping[str, str] = {
    "workdir": "sha256:… is a snapshot of the same project; /… is a folder of the node, linked by the job's user"
}
_ACCOUNT = frozenset(
    "rent.gpu rent.types rent.regions rent.image slurm.partition slurm.account slurm.qos slurm.constraint "
    "slurm.reservation slurm.gpu_type slurm.nodelist slurm.exclude slurm.options queue.name queue.priority".split()
)
_DATA = ("path", "held_out_path", "dataset", "subset", "split", "held_out_split", "revision")
_NODE = frozenset(
    "command env container.image container.options slurm.mounts slurm.task_prolog slurm.task_epilog "
    "preflight.expect.mounts preflight.expect.kernel_modules train.data.tokenizer train.data.cache "
    "train.checkpoint.memory.folder train.checkpoint.remote.url train.checkpoint.managed.namespace "
    "train.checkpoint.managed.s3 train.checkpoint.managed.daemon train.watch.tensorboard train.watch.wandb_project "
    "train.watch.mlflow_uri train.init_from container.login.user".split()
) | {f"{part}.{name}" for part in ("train.data", "train.data.parts") for name in _DATA}
_NOTHING = frozenset(
    "name slurm.array preflight.profile preflight.expect.gpu_model preflight.expect.driver preflight.expect.vbios "
    "preflight.expect.xids preflight.expect.governor preflight.skip preflight.require allow "
    "train.model.preset train.model.family train.data.source train.data.text_field train.data.parts.source "
    "train.data.parts.text_field train.data.end_token inputs.sha256 limits.retry zone".split()
)
BOUNDS: Mapping[str, str] = {**_SERVER, **_UPLOADED}
PLACES: Mapping[str, Place] = {
    **dict.fromkeys(_SERVER, Place.SERVER),
    **dict.fromkeys(_UPLOADED, Place.UPLOADED),
    **dict.fromkeys(sorted(_NODE), Place.NODE),
    **dict.fromkeys(sorted(_ACCOUNT), Place.ACCOUNT),
    **dict.fromkeys(sorted(_NOTHING), Place.NOTHING),
}


def is_naming(type_text: str) -> bool:
    """Whether a field of this type (`schema.describe`) may name something: text, and lists and mappings of it."""
    return "text" in type_text or type_text.startswith("mapping")

"""Checkpoints that can be trusted.

    FOLDER/step-00000050/          committed: its name has no ending
        __0_0.distcp …             shards, one file or more of each rank (torch.distributed.checkpoint)
        .metadata                  index: which tensor is where in the shards
        manifest.json              size and SHA-256 of every file, the run's state, its provenance; its own digest
    FOLDER/step-00000100.tmp/      a save under way, or one that was cut off; never read

Saving, while training goes on: a copy in host memory; shards into the .tmp folder, hashed as they are written, fsync;
manifest, fsync, rename; fsync the folder; rename the folder; fsync its parent. Only then are older checkpoints deleted.
Loading: newest first, every byte checked against the manifest as it is read, down to the first good one. Where
checkpoints exist and none is good the run is refused: it never starts over by itself.

Imports go one way, `protocol` ← `disk` ← `tiers` and `managed`:

    protocol       interface of the loop       checkpointing  when to save, what to report
    host_copy      copy off the device         snapshot       the run at one step
    layout         which rank writes what      write, read    bytes and their hashes
    save           one save, in a thread       load           newest good checkpoint, or a refusal
    manifest       the folder of checkpoints   provenance     config, commit, versions, hosts
    disk           the disk tier               weights        weights alone, for export and init_from
    tiers/         memory, disk and remote tiers composed; loss bound and cadence
    managed/       HyperPod's managed tiers
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.train.checkpoint.protocol import Checkpoints, Run


def open_checkpoints(run: Run, folder: Path) -> Checkpoints:
    """The checkpoints that the config asks for: managed tiers, or our own around `folder`."""
    if run.config.checkpoint.managed is not None:
        from trainmaster.train.checkpoint.managed.checkpoints import Managed

        return Managed(run, run.config.checkpoint.managed)
    from trainmaster.train.checkpoint.tiers.tiered import Tiered

    return Tiered(run, folder)

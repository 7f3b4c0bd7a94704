"""Checkpoints that can be trusted.

    FOLDER/step-00000050/          committed: its name has no ending
        __0_0.distcp …             shards, one file per rank that wrote (torch.distributed.checkpoint)
        .metadata                  which tensor is where in the shards
        manifest.json              size and SHA-256 of every file, the run's state; its own digest
    FOLDER/step-00000100.tmp/      a save under way, or one that was cut off; never read

Saving: shards into the .tmp folder, fsync; hash; manifest, fsync, rename; fsync the folder; rename the folder; fsync
its parent. Only then are older checkpoints deleted. Loading: newest first, every byte checked against the manifest,
down to the first good one. Where checkpoints exist and none is good the run is refused: it never starts over by itself.
"""

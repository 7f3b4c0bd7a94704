"""Checkpoints that can be trusted.

    FOLDER/step-00000050/          committed: its name has no ending
        __0_0.distcp …             shards, one file or more of each rank (torch.distributed.checkpoint)
        .metadata                  which tensor is where in the shards
        manifest.json              size and SHA-256 of every file, the run's state, where it comes from; its own digest
    FOLDER/step-00000100.tmp/      a save under way, or one that was cut off; never read

Saving, while training goes on: a copy in host memory; shards into the .tmp folder, hashed as they are written, fsync;
manifest, fsync, rename; fsync the folder; rename the folder; fsync its parent. Only then are older checkpoints deleted.
Loading: newest first, every byte checked against the manifest as it is read, down to the first good one. Where
checkpoints exist and none is good the run is refused: it never starts over by itself.

    manager   what the loop sees              layout    which rank writes what     load    newest good, or a refusal
    stage     the copy off the device         write     bytes to disk and hash     read    bytes from disk and hash
    save      one save, in the background     manifest  what must be where         origin  who, when, with what

    tiers     memory, disk, store in turn     memory    a node's folder of tmpfs   replicas  its copies on other nodes
    bound     what a loss costs               to_disk   from memory to the disk    send      files from rank to rank
    pace      which tier is due               remote    the object store           managed*  HyperPod's own tiers
"""

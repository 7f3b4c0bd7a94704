"""Single-device models, one file each. train/parallel/shard.py shards them over ranks."""

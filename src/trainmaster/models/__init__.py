"""Single-device models, one file each. They know nothing of ranks; train/parallel/shard.py spreads them."""

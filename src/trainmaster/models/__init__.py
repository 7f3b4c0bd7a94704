"""Single-device models, one file each. They know nothing of ranks; train/shard.py spreads them."""

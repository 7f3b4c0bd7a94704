"""Memory, disk and remote tiers of checkpoints, and how often each is saved to."""

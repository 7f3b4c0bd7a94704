"""Checks that use the GPUs (levels 2 and 3): one file per check."""

"""Prove the cluster, train on it, never lose a run."""

__version__ = "0.1.0"

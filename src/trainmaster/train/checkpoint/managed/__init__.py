"""Checkpoints in the managed tiers of SageMaker HyperPod."""

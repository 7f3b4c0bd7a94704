"""Data of the acceptance test: synthetic batches, and image data sets."""

from trainmaster.bench.accept.workload import synthetic_batch
from trainmaster.datasets.images import open_images

__all__ = ["open_images", "synthetic_batch"]

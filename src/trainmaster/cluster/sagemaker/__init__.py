"""The health check of SageMaker: the training job, its process on a host, its results."""

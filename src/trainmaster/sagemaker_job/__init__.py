"""The health check of a cluster as a SageMaker training job: `python -m trainmaster.sagemaker_job` on every host."""

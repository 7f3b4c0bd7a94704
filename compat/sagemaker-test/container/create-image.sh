#!/usr/bin/env bash
# Build the image of the cluster test and push it to ECR:  ./create-image.sh sagemaker-cluster-test latest
# The script itself is in deploy/sagemaker, the image a stage of the Dockerfile.
exec "$(dirname "${BASH_SOURCE[0]}")/../../../deploy/sagemaker/create-image.sh" "$@"

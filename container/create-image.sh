#!/usr/bin/env bash
# Build the image of the cluster test and push it to ECR:  ./create-image.sh sagemaker-cluster-test latest
# The image's files are in deploy/sagemaker; this folder has the script under the name that guides use.
exec "$(dirname "${BASH_SOURCE[0]}")/../deploy/sagemaker/create-image.sh" "$@"

#!/usr/bin/env bash
# Build the image of the cluster test and push it to ECR:  ./create-image.sh [NAME] [TAG]
#
#   NAME  of the image and its ECR repository (sagemaker-cluster-test), made if it is not there
#   TAG   latest
#
# From the environment: AWS_REGION (else the AWS CLI's own), BASE_IMAGE (else the Dockerfile's), DOCKER (docker),
# DRY_RUN=1 prints the commands and runs none.
set -euo pipefail

name=${1:-sagemaker-cluster-test}
tag=${2:-latest}
docker=${DOCKER:-docker}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

if [ $# -gt 2 ] || [[ ! $name =~ ^[a-z0-9][a-z0-9._/-]*$ ]] || [[ ! $tag =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]]; then
    echo "usage: $0 [NAME] [TAG]      for example: $0 sagemaker-cluster-test latest" >&2
    exit 2
fi

run() {
    echo "+ $*" >&2
    [ -n "${DRY_RUN:-}" ] || "$@"
}

if [ -n "${DRY_RUN:-}" ]; then
    region=${AWS_REGION:-us-east-1} account=123456789012
else
    region=${AWS_REGION:-$(aws configure get region)}
    account=$(aws sts get-caller-identity --query Account --output text)
fi
registry=$account.dkr.ecr.$region.amazonaws.com
image=$registry/$name:$tag

login() { # REGISTRY
    echo "+ aws ecr get-login-password --region $region | $docker login --username AWS --password-stdin $1" >&2
    # Through a pipe: a password in an argument is seen by everybody on the machine.
    [ -n "${DRY_RUN:-}" ] \
        || aws ecr get-login-password --region "$region" | "$docker" login --username AWS --password-stdin "$1"
}

base=()
if [ -n "${BASE_IMAGE:-}" ]; then
    base=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
    # Amazon's own images live in an ECR that wants a login of its own.
    case $BASE_IMAGE in *.dkr.ecr.*) login "${BASE_IMAGE%%/*}" ;; esac
fi

run "$docker" build --platform linux/amd64 --target sagemaker ${base[@]+"${base[@]}"} --tag "$name:$tag" "$root"
if [ -n "${DRY_RUN:-}" ] \
    || ! aws ecr describe-repositories --region "$region" --repository-names "$name" >/dev/null 2>&1; then
    run aws ecr create-repository --region "$region" --repository-name "$name"
fi
login "$registry"
run "$docker" tag "$name:$tag" "$image"
run "$docker" push "$image"
echo "$image"

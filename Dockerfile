# Acceptance tests of GPU clusters in a container:
#
#   docker build --platform linux/amd64 -t gpu_cluster_testing:latest .
#   docker run --gpus all --rm --ipc=host gpu_cluster_testing:latest --model resnet18 --batch-size 128
#
# Arguments go to `trainmaster accept`; without any the defaults run. A first argument without a dash is a command of
# its own: bash -c "cd /workspace/src && torchrun --nproc_per_node=8 train.py --model resnet50".
#
# NVIDIA's image brings torch, CUDA, NCCL with its headers, and Open MPI.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${BASE_IMAGE}

# NVIDIA's nccl-tests with MPI: /workspace/nccl-tests/build/all_reduce_perf under mpirun.
ARG NCCL_TESTS_URL=https://github.com/NVIDIA/nccl-tests.git
ARG NCCL_TESTS_VERSION=v2.17.6
RUN command -v mpirun >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends openmpi-bin libopenmpi-dev \
        && rm -rf /var/lib/apt/lists/*)
RUN git clone --depth 1 --branch "${NCCL_TESTS_VERSION}" "${NCCL_TESTS_URL}" /workspace/nccl-tests \
    && make -C /workspace/nccl-tests -j "$(nproc)" MPI=1 MPI_HOME="${MPI_HOME:-/usr/local/mpi}"

COPY pyproject.toml README.md LICENSE /opt/trainmaster/
COPY docs/examples /opt/trainmaster/docs/examples
COPY src /opt/trainmaster/src
# torch is the base image's own.
RUN pip install --no-cache-dir "/opt/trainmaster[images,server]"

COPY deploy/acceptance/src /workspace/src
COPY scripts/entrypoint.sh /workspace/scripts/entrypoint.sh
WORKDIR /workspace
VOLUME /workspace/data
ENTRYPOINT ["/workspace/scripts/entrypoint.sh"]

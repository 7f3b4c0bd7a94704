# Images of Trainmaster, one stage each:
#
#   docker build --target trainmaster -t trainmaster:latest .    checks, trainer and agent of jobs
#   docker build --target sagemaker -t cluster-test:latest .     health check as a SageMaker training job
#   docker build -t gpu_cluster_testing:latest .                 acceptance test of a GPU cluster (stage `acceptance`)
#
# BuildKit and podman build only the stages that the chosen one needs. --build-arg BASE_IMAGE=… replaces the base: any
# image with Python 3.11 or newer and torch will do. NVIDIA's is there for amd64 and arm64 (--platform linux/amd64).
ARG BASE_IMAGE=

FROM scratch AS source
COPY pyproject.toml README.md LICENSE constraints.txt /
COPY examples/jobs /examples/jobs
COPY src /src


#   docker run --gpus all --rm --ipc=host trainmaster:latest check --level 1
#
# Arguments go to `trainmaster`. In pods: `image:` this image, `package: image` and `python: /opt/trainmaster/bin/python`
# in the cluster's file.
FROM ${BASE_IMAGE:-nvcr.io/nvidia/pytorch:25.10-py3} AS trainmaster
ARG EXTRAS=storage
COPY --from=source / /opt/trainmaster/source
# An environment over the base's packages: torch stays the base's own, and nothing of the base is changed.
RUN python3 -m venv --system-site-packages --without-pip /opt/trainmaster \
    && python3 -m pip --python /opt/trainmaster/bin/python install --no-cache-dir "/opt/trainmaster/source[${EXTRAS}]" \
    && rm -r /opt/trainmaster/source \
    && mkdir -p -m 1777 /home/trainmaster
ENV PATH=/opt/trainmaster/bin:${PATH} HOME=/home/trainmaster
WORKDIR /home/trainmaster
# No root; any other user works as well.
USER 1000:1000
ENTRYPOINT ["trainmaster"]


# deploy/sagemaker/create-image.sh builds this stage and pushes it to ECR.
### Customizable: the base image, and the packages of your training. Best is the image you train with. ###
FROM ${BASE_IMAGE:-public.ecr.aws/deep-learning-containers/pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker} AS sagemaker

# Your own packages go here.

### Required Packages for the cluster test. DO NOT REMOVE ###
# libfabric: `fi_info` and `fi_pingpong`, which show whether EFA works. A base image with Amazon's EFA installer has its
# own under /opt/amazon/efa, which is used too. datacenter-gpu-manager: `dcgmi diag`, from NVIDIA's CUDA repository; the
# package of DCGM 4 is named by its CUDA version. The build fails without DCGM: add NVIDIA's CUDA repository above.
# --build-arg DCGM=none leaves it out, and `dcgm` is then skipped.
ARG DCGM=required
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make g++ libfabric-bin libfabric-dev pciutils kmod \
    && if [ "${DCGM}" != none ]; then \
        (apt-get install -y --no-install-recommends datacenter-gpu-manager-4-cuda13 \
        || apt-get install -y --no-install-recommends datacenter-gpu-manager-4-cuda12 \
        || apt-get install -y --no-install-recommends datacenter-gpu-manager) \
        && dcgmi --version; fi \
    && rm -rf /var/lib/apt/lists/*
# NVIDIA's nccl-tests, which the job runs on every host; NCCL_TESTS_VERSION=none leaves them out (no CUDA compiler).
ARG NCCL_TESTS_VERSION=master
RUN [ "${NCCL_TESTS_VERSION}" = none ] && mkdir /opt/nccl-tests \
    || (git clone --depth 1 --branch "${NCCL_TESTS_VERSION}" https://github.com/NVIDIA/nccl-tests.git /opt/nccl-tests \
        && make -C /opt/nccl-tests -j "$(nproc)")
RUN mkdir -p /usr/local/cuda/efa \
    && ln -s /opt/nccl-tests /usr/local/cuda/efa/test-
ENV PATH="/opt/nccl-tests/build:${PATH}"
# psutil for scripts of your own; Trainmaster itself reads /proc and /sys.
RUN pip install --no-cache-dir "psutil>=5.9.0"
COPY --from=source / /opt/trainmaster
RUN pip install --no-cache-dir "/opt/trainmaster[server,storage]"
### End of the required part ###


#   docker run --gpus all --rm --ipc=host gpu_cluster_testing:latest --model resnet18 --batch-size 128
#
# Arguments go to `trainmaster accept`; without any the defaults run. A first argument without a dash is a command of
# its own: bash -c "cd /workspace/src && torchrun --nproc_per_node=8 train.py --model resnet50". The last stage, so that
# `docker build .` makes it. NVIDIA's image brings torch, CUDA, NCCL with its headers, and Open MPI.
FROM ${BASE_IMAGE:-nvcr.io/nvidia/pytorch:25.10-py3} AS acceptance
# NVIDIA's nccl-tests with MPI: /workspace/nccl-tests/build/all_reduce_perf under mpirun. NCCL_TESTS_VERSION=none leaves
# them out, for a base without a CUDA compiler.
ARG NCCL_TESTS_URL=https://github.com/NVIDIA/nccl-tests.git
ARG NCCL_TESTS_VERSION=v2.17.6
RUN command -v mpirun >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends openmpi-bin libopenmpi-dev \
        && rm -rf /var/lib/apt/lists/*)
RUN [ "${NCCL_TESTS_VERSION}" = none ] \
    || (git clone --depth 1 --branch "${NCCL_TESTS_VERSION}" "${NCCL_TESTS_URL}" /workspace/nccl-tests \
        && make -C /workspace/nccl-tests -j "$(nproc)" MPI=1 MPI_HOME="${MPI_HOME:-/usr/local/mpi}")
COPY --from=source / /opt/trainmaster
# torch is the base image's own.
RUN pip install --no-cache-dir "/opt/trainmaster[images,server]"
COPY compat/gpu-acceptance/src /workspace/src
COPY compat/gpu-acceptance/scripts/entrypoint.sh /workspace/scripts/entrypoint.sh
WORKDIR /workspace
VOLUME /workspace/data
ENTRYPOINT ["/workspace/scripts/entrypoint.sh"]

"""Failure texts from public issue trackers: each gives its reason, and says whether the job is retried.

A text is cut to its decisive lines; the address is where it was posted.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from trainmaster.agent.diagnose import judge

GITHUB = "https://github.com"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a rank printed, how it ended, and what must follow."""

    name: str
    source: str
    lines: tuple[str, ...] = ()
    code: int = 1
    reason: str
    retry: bool = True


CASES = [
    Case(name="SIGKILL", source="kill -9 of a rank", code=-9, reason="crashed"),
    Case(name="SIGSEGV", source="a native library", code=-11, reason="crashed"),
    Case(name="SIGBUS", source="a truncated memory map", code=-7, reason="crashed"),
    Case(name="SIGABRT", source="an abort without a word", code=-6, reason="crashed"),
    Case(name="137 of a shell", source="bash -c", code=137, reason="crashed"),
    Case(name="139 of a shell", source="bash -c", code=139, reason="crashed"),
    Case(name="SIGTERM from outside", source="a scheduler", code=-15, reason="preempted"),
    Case(
        name="NCCL system error", source=f"{GITHUB}/pytorch/pytorch/issues/149984", code=-6, reason="fabric_error",
        lines=(
            "Collective WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1000000) raised the "
            "following async exception: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), "
            "NCCL version 2.25.1",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
            "Last error:",
        ),
    ),
    Case(
        name="NCCL internal error", source=f"{GITHUB}/NVIDIA/nccl/issues/1247", reason="fabric_error",
        lines=(
            "torch.distributed.DistBackendError: NCCL error in: /root/pytorch/torch/csrc/distributed/c10d/"
            "ProcessGroupNCCL.cpp:1333, internal error - please report this issue to the NCCL developers, NCCL version "
            "2.18.6",
            "ncclInternalError: Internal check failed.",
        ),
    ),
    Case(
        name="unhandled CUDA error", source=f"{GITHUB}/NVIDIA/nccl/issues/1653", reason="gpu_error",
        lines=(
            "include/alloc.h:112 NCCL WARN Cuda failure 999 'unknown error'",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
        ),
    ),
    Case(
        name="InfiniBand completion", source=f"{GITHUB}/NVIDIA/nccl/issues/1814", code=-6, reason="fabric_error",
        lines=(
            "ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 172.36.143.59<44206> with status=12 "
            "opcode=129 len=65536 vendor err 129 (Recv) localGid ::ffff:29.87.88.182 remoteGids::ffff:29.87.4.221",
        ),
    ),
    Case(
        name="EFA request", source=f"{GITHUB}/aws/aws-ofi-nccl/issues/161", reason="fabric_error",
        lines=("NCCL WARN NET/OFI Request completed with error. RC: 21. Error: unknown error",),
    ),
    Case(
        name="EFA address", source=f"{GITHUB}/aws/aws-ofi-nccl/issues/346", reason="fabric_error",
        lines=(
            "libfabric:451707:1708520807::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, message: Invalid address "
            "My EFA addr: fi_addr_efa://[fe80::13:c2ff:fe6f:f03d]:0:1072483550",
        ),
    ),
    Case(
        name="EFA receiver", source=f"{GITHUB}/ofiwg/libfabric/pull/10158", reason="fabric_error",
        lines=("message: Unresponsive receiver (connection never established or unknown)",),
    ),
    Case(
        name="unspecified launch failure", source=f"{GITHUB}/deepseek-ai/DeepSeek-MoE/issues/47", code=-6,
        reason="gpu_error",
        lines=(
            "[rank1]:[E410 01:50:33.889423318 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 1] "
            "Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure",
        ),
    ),
    Case(
        name="illegal memory access", source=f"{GITHUB}/InternLM/lmdeploy/issues/3258", code=-6, reason="gpu_error",
        lines=(
            "terminate called after throwing an instance of 'c10::DistBackendError'",
            "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with "
            "exception: CUDA error: an illegal memory access was encountered",
        ),
    ),
    Case(
        name="illegal access in Triton", source=f"{GITHUB}/vllm-project/vllm/issues/17098", reason="gpu_error",
        lines=("RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",),
    ),
    Case(
        name="watchdog abort", source=f"{GITHUB}/GAIR-NLP/DeepResearcher/issues/16", code=-6,
        reason="collective_timeout",
        lines=(
            "[rank3]:[E416 20:40:12.986061777 ProcessGroupNCCL.cpp:621] [Rank 3] Some NCCL operations have failed or "
            "timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on "
            "corrupted/incomplete data.",
            "[rank3]:[E416 20:40:12.986079237 ProcessGroupNCCL.cpp:627] [Rank 3] To avoid data inconsistency, we are "
            "taking the entire process down.",
        ),
    ),
    Case(
        name="watchdog stuck", source=f"{GITHUB}/hiyouga/LlamaFactory/issues/6953", code=-6,
        reason="collective_timeout",
        lines=(
            "[rank144]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 144] [PG 0 Rank 144] ProcessGroupNCCL's watchdog got "
            "stuck for 600 seconds without making progress in monitoring enqueued collectives.",
        ),
    ),
    Case(
        name="watchdog thread", source=f"{GITHUB}/pytorch/pytorch/issues/113128", code=-6, reason="collective_timeout",
        lines=("[E ProcessGroupNCCL.cpp:915] [Rank 0] NCCL watchdog thread terminated with exception: ",),
    ),
    Case(
        name="stale file handle", source=f"{GITHUB}/huggingface/transformers/issues/9732", reason="file_system_error",
        lines=("OSError: [Errno 116] Stale file handle",),
    ),
    Case(
        name="input/output error", source=f"{GITHUB}/MIC-DKFZ/nnUNet/issues/1784", reason="file_system_error",
        lines=(
            "OSError: [Errno 5] Input/output error: "
            "'/media/project/nnUNet/nnUNet_preprocessed/Dataset002_CCTA_3D/nnUNetPlans_3d_fullres/L0550_RCA.pkl'",
        ),
    ),
    Case(
        name="torchrun around a SIGKILL", source=f"{GITHUB}/xiaomi-research/time-r1/issues/9", reason="crashed",
        lines=(
            "E0813 06:19:49.809000 161210 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed "
            "(exitcode: -9) local_rank: 2 (pid: 161617) of binary: /envs/timer1/bin/python3.11",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        ),
    ),
    Case(
        name="torchrun around a SIGSEGV", source=f"{GITHUB}/FlagOpen/FlagEmbedding/issues/1549", reason="crashed",
        lines=(
            "E1119 08:26:02.715000 28705 site-packages/torch/distributed/elastic/multiprocessing/api.py:882] failed "
            "(exitcode: -11) local_rank: 0 (pid: 28773) of binary: /app/anaconda3/envs/py312/bin/python3.12",
        ),
    ),
    Case(
        name="a worker by its signal", source=f"{GITHUB}/fidelity/stoke/issues/31", reason="crashed",
        lines=("  traceback : Signal 9 (SIGKILL) received by PID 10398",),
    ),
    Case(
        name="mp.spawn around a SIGKILL", source=f"{GITHUB}/resistzzz/Prompt4NR/issues/3", reason="crashed",
        lines=("torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL",),
    ),
    Case(
        name="abort with a Python trace", source=f"{GITHUB}/vllm-project/vllm/issues/4108", code=-6, reason="crashed",
        lines=("Fatal Python error: Aborted",),
    ),
    # Not retried: the next attempt would meet the same.
    Case(
        name="shared memory of a worker", source=f"{GITHUB}/hezhangsprinter/DCPDN/issues/58", reason="out_of_memory",
        retry=False,
        lines=(
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory "
            "(shm).",
        ),
    ),
    Case(
        name="torchrun around an exit code", source=f"{GITHUB}/yangjianxin1/Firefly/issues/32", reason="script_failed",
        retry=False,
        lines=(
            "Exception: expected value at line 1 column 1",
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 24024) of "
            "binary: /opt/conda/bin/python",
        ),
    ),
    Case(
        name="device-side assert", source="an index beyond the vocabulary", code=-6, reason="script_failed",
        retry=False,
        lines=(
            "terminate called after throwing an instance of 'c10::DistBackendError'",
            "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with "
            "exception: CUDA error: device-side assert triggered",
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_failure_gives_its_reason_and_whether_it_is_retried(case: Case) -> None:
    found = judge(rank=1, ranks=2, code=case.code, lines=list(case.lines), oom_kills=0)
    assert found.reason is not None
    assert (found.reason.value, found.reason.rule.retry) == (case.reason, case.retry)

"""The table of patterns, line by line as the programs print them, and the mask over secrets."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from test_real_failures import CASES

from trainmaster.agent.diagnose import advise_on_start, count_oom_kills, judge, mask, read_tail
from trainmaster.core.errors import FileUnreadable
from trainmaster.core.failures import FAILURES, SIGNALS
from trainmaster.core.plan import WORK_FOLDER
from trainmaster.core.states import Reason
from trainmaster.node.host import Host

LINES = [
    ("[rank 3 node 0] out of memory: rank 3 (node 0, NVIDIA H200): CUDA out of memory. Tried to allocate 2.00 GiB; it "
     "held 138.2 of 139.8 GiB", Reason.OUT_OF_MEMORY),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", Reason.OUT_OF_MEMORY),
    ("RuntimeError: CUDA error: out of memory", Reason.OUT_OF_MEMORY),
    ("NCCL WARN Cuda failure 2 'out of memory'", Reason.OUT_OF_MEMORY),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
     "tried to allocate 400000000000 bytes.", Reason.OUT_OF_MEMORY),
    ("MemoryError", Reason.OUT_OF_MEMORY),
    ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array", Reason.OUT_OF_MEMORY),
    ("terminate called after throwing an instance of 'std::bad_alloc'", Reason.OUT_OF_MEMORY),
    ("OSError: [Errno 12] Cannot allocate memory", Reason.OUT_OF_MEMORY),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
     "workers are out of shared memory.", Reason.OUT_OF_MEMORY),
    ("OSError: [Errno 28] No space left on device: '/x/step-5'", Reason.DISK_FULL),
    ("OSError: [Errno 122] Disk quota exceeded", Reason.DISK_FULL),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", Reason.NODE_LOST),
    ("CUDA error: uncorrectable NVLink error detected during the execution", Reason.NODE_LOST),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
     "29500", Reason.TARGET_ERROR),
    ("[rank 0 node 0] hang: rank 5 (node 1, gpu-1, pid 7) is stopped (SIGSTOP, or a debugger holds it); 7 of 8 ranks "
     "wait in all_reduce #25 of gloo:default_pg (35 elements) in step 12 since 60 s", Reason.COLLECTIVE_TIMEOUT),
    ("[rank 0 node 0] hang: all 8 ranks are in all_gather #9 of nccl:default_pg (35 elements) in step 2 since 60 s",
     Reason.COLLECTIVE_TIMEOUT),
    ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST)",
     Reason.COLLECTIVE_TIMEOUT),
    ("RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to "
     "complete", Reason.COLLECTIVE_TIMEOUT),
    ("RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:22",
     Reason.COLLECTIVE_TIMEOUT),
    ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [::1]: Connection reset by peer",
     Reason.COLLECTIVE_TIMEOUT),
    ("ncclRemoteError: A call failed possibly due to a network error", Reason.COLLECTIVE_TIMEOUT),
    ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0", Reason.COLLECTIVE_TIMEOUT),
    ("DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined.",
     Reason.COLLECTIVE_TIMEOUT),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", Reason.SCRIPT_FAILED),
    ("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot the system to recover this GPU",
     Reason.NODE_LOST),
    ("RuntimeError: CUDA error: misaligned address", Reason.GPU_ERROR),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
     Reason.GPU_ERROR),
    ("OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/run/step-5'",
     Reason.FILE_SYSTEM_ERROR),
    ("OSError: [Errno 121] Remote I/O error: '/nfs/data/0.tokens'", Reason.FILE_SYSTEM_ERROR),
    ("gpu-1:7:9 [0] ibvwrap.cc:190 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
     Reason.FABRIC_ERROR),
    ("libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.", Reason.FABRIC_ERROR),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", Reason.GPU_ERROR),
    ("RuntimeError: No CUDA GPUs are available", Reason.GPU_ERROR),
    ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
     "NumCudaDevices()? Error 802: system not yet initialized", Reason.GPU_ERROR),
    ("BlockingIOError: [Errno 11] Resource temporarily unavailable", Reason.TARGET_ERROR),
    ("OSError: [Errno 110] Connection timed out: '/fsx/data/3.tokens'", Reason.FILE_SYSTEM_ERROR),
    ("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation (reached max "
     "retries: 4): Please reduce your request rate.", Reason.STORAGE_ERROR),
    ("requests.exceptions.HTTPError: 503 Server Error: Service Temporarily Unavailable for url: https://hub/a",
     Reason.STORAGE_ERROR),
    ("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
     Reason.COLLECTIVE_TIMEOUT),
    ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 139 got signal: 15", Reason.PREEMPTED),
    ("RuntimeError: DataLoader worker (pid(s) 7, 8) is killed by signal: Killed.", Reason.CRASHED),
    ("AssertionError: loss is NaN", Reason.SCRIPT_FAILED),
    ("requests.exceptions.ConnectionError: Connection reset by peer", Reason.SCRIPT_FAILED),
    ("retrying: MemoryErrorHandler registered", Reason.SCRIPT_FAILED),
]  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), LINES)
def test_a_line_gives_its_reason(line: str, reason: Reason) -> None:
    found = judge(rank=0, ranks=1, code=1, lines=["before", line, "after"], oom_kills=0)
    assert found.reason is reason
    assert found.evidence.get("cause") == (line if any(row.pattern.search(line) for row in FAILURES) else None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"python: can't open file '/h/jobs/a/{WORK_FOLDER}/nothere.py': [Errno 2] No such file or directory",
         "; nothere.py is not in the working folder that was sent: check the name, and .trainmasterignore"),
        (f"python: can't open file '/home/me/{WORK_FOLDER}/x.py': [Errno 2] No such file or directory",
         "; x.py is not on that machine: check its path"),
        ("/opt/py/bin/python3.11: can't open file '/data/x.py': [Errno 2] No such file or directory",
         "; x.py is not on that machine: check its path"),
        ("/bin/bash: line 1: pythn3: command not found",
         "; pythn3 is not in PATH on that machine: name the whole path, or use python3"),
        ("sh: 1: torchrum: not found", "; torchrum is not in PATH on that machine: name the whole path"),
        ("/bin/sh: 1: torchrum: not found", "; torchrum is not in PATH on that machine: name the whole path"),
        ("KeyError: 'vocabulary: not found'", "KeyError: 'vocabulary: not found'"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'", "'data.bin'"),
    ],
)  # fmt: skip
def test_a_missing_script_or_program_says_what_to_do(line: str, says: str) -> None:
    found = judge(rank=0, ranks=1, code=2, lines=["before", line], oom_kills=0)
    assert found.reason is Reason.SCRIPT_FAILED and found.message.endswith(says)


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (FileNotFoundError(2, "x", "pythn3"), "pythn3 is not in PATH on that machine: name the whole path, or use"),
        (FileNotFoundError(2, "x", "torchrum"), "torchrum is not in PATH on that machine: name the whole path"),
        (FileNotFoundError(2, "x", "/opt/no/python"), "is not on that machine: check the path"),
        (PermissionError(13, "x", "./train.py"), "./train.py may not be executed there: chmod +x it"),
        (OSError(8, "Exec format error"), "check the command of the spec"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_be_started_says_what_to_do(cause: OSError, says: str) -> None:
    assert says in advise_on_start(cause)


def test_every_pattern_has_its_line() -> None:
    lines = [line for line, _ in LINES] + [line for case in CASES for line in case.lines]
    assert [row.pattern.pattern for row in FAILURES if not any(map(row.pattern.search, lines))] == []


def test_a_cause_beats_the_symptoms_around_it() -> None:
    lines = ["Connection closed by peer", "CUDA out of memory.", "Connection closed by peer"]
    assert judge(rank=0, ranks=2, code=1, lines=lines, oom_kills=0).reason is Reason.OUT_OF_MEMORY


def test_a_kill_is_for_memory_only_where_the_kernel_counted_one() -> None:
    assert judge(rank=0, ranks=1, code=-9, lines=[], oom_kills=1).reason is Reason.OUT_OF_MEMORY
    assert judge(rank=0, ranks=1, code=-9, lines=[], oom_kills=0).reason is Reason.CRASHED
    assert judge(rank=0, ranks=1, code=-15, lines=[], oom_kills=1).reason is Reason.PREEMPTED
    assert judge(rank=0, ranks=1, code=-2, lines=[], oom_kills=1).reason is Reason.SCRIPT_FAILED


class Machine(Host):
    """A host that has these files and no others."""

    def __init__(self, **files: str) -> None:
        self.files = files

    def read(self, path: str) -> str:
        for name, text in self.files.items():
            if path.endswith(name):
                return text
        raise FileUnreadable(path)


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"cgroup": "0::/job\n", "/sys/fs/cgroup/job/memory.events": "oom 3\noom_kill 2\n", "vmstat": "oom_kill 9"}, 2),
        ({"cgroup": "4:memory:/job\n", "/memory/job/memory.oom_control": "under_oom 0\noom_kill 1\n"}, 1),
        ({"cgroup": "0::/job\n", "vmstat": "oom_kill 9\npgfault 1"}, 9),
        ({}, 0),
    ],
)
def test_oom_kills_are_counted_in_our_own_group_first(files: dict[str, str], count: int) -> None:
    assert count_oom_kills(Machine(**files)) == count


def test_this_machine_counts_oom_kills() -> None:
    assert count_oom_kills(Host()) >= 0


def test_an_exit_code_of_ours_beats_the_log() -> None:
    assert judge(rank=0, ranks=1, code=65, lines=["MemoryError"], oom_kills=0).reason is Reason.BAD_DATA


def test_a_mount_that_fails_behind_an_exit_code_of_ours_is_a_mount() -> None:
    lines = ["data error: OSError: [Errno 5] Input/output error: '/lustre/0.tokens'"]
    assert judge(rank=0, ranks=1, code=65, lines=lines, oom_kills=0).reason is Reason.FILE_SYSTEM_ERROR


def test_a_held_lock_is_no_bad_checkpoint() -> None:
    """Its advice was to remove the checkpoint, a good one of a living run."""
    lines = ["checkpoint error: /run/checkpoints is in use by process 7 on gpu-1"]
    reason = judge(rank=0, ranks=1, code=69, lines=lines, oom_kills=0).reason
    assert reason is Reason.CHECKPOINT_IN_USE and reason.rule.retry and "remove" not in reason.rule.action


def test_evidence_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"x" * 3_000_000 + b"\n" + b"y" * 9_000 + b"\xff\n" + b"z\n" * 39)
    found = judge(rank=0, ranks=1, code=1, lines=read_tail(log), oom_kills=0)
    assert found.evidence["last_lines"] == ["y" * 500] + ["z"] * 39
    assert read_tail(tmp_path / "none.log") == []


SECRET_NAMES = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "wandb_api_key", "DB_PASSWORD", "KEY2", "MY_TOKENS", "GITHUBTOKEN"]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_values_of_secret_names_are_masked(name: str) -> None:
    assert mask({"a": ["x s3cret y"], "n": 1}, [{name: "s3cret"}]) == {"a": ["x *** y"], "n": 1}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH"])
def test_values_of_other_names_are_not(name: str) -> None:
    assert mask("false", [{name: "false"}]) == "false"


def test_a_secret_inside_another_and_one_of_many_lines() -> None:
    env = {"A_KEY": "abcd", "B_KEY": "abcdefgh", "C_KEY": "-----BEGIN\nline-of-key\n"}
    assert mask("abcdefgh abcd", [env]) == "*** ***"
    assert mask("line-of-key", [env]) == "***"
    assert mask("it is ok", [{"A_KEY": "is"}]) == "it is ok"


@pytest.mark.parametrize(
    ("code", "lines", "message"),
    [
        (-9, ["1"], 'rank 0 of 1 was killed by SIGKILL; its last line: "1"'),
        (-9, [], "rank 0 of 1 was killed by SIGKILL; it printed nothing"),
        (-9, ["CUDA out of memory"], "rank 0 of 1 was killed by SIGKILL: CUDA out of memory"),
        (3, ["the error", ""], "rank 0 of 1 exited with 3: the error"),
        (
            65,
            ["2026-11-15T22:00:27.215Z ERROR [rank 0 node 0] data error: no such folder"],
            "rank 0 of 1 exited with 65: data error: no such folder",
        ),
    ],
)
def test_a_reason_tells_a_cause_from_a_last_line(code: int, lines: list[str], message: str) -> None:
    assert judge(rank=0, ranks=1, code=code, lines=lines, oom_kills=0).message == message


def test_a_kill_from_outside_is_not_the_full_disk_that_was_told_before() -> None:
    lines = ["WARNING saves fail: OSError: [Errno 28] No space left on device: '/x/step-5'", "step 35/60 Loss: 2.1"]
    killed = judge(rank=0, ranks=4, code=-9, lines=lines, oom_kills=0, full="/x")
    assert killed.reason is SIGNALS.get(signal.SIGKILL, Reason.SCRIPT_FAILED)
    assert judge(rank=0, ranks=4, code=1, lines=lines, oom_kills=0, full="/x").reason is Reason.DISK_FULL

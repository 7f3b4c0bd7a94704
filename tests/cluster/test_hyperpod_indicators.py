"""Each success indicator of the HyperPod tests: passed, failed, not measured. And a healthy cluster as a whole."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainmaster.cluster.hyperpod import helper, indicators, manifest, objects
from trainmaster.cluster.hyperpod.indicators import Measurements, judge
from trainmaster.cluster.hyperpod.logs import PodLog
from trainmaster.cluster.hyperpod.pods import Restart, find_restarts, parse_gpu_metrics, parse_smi, sample_gpus
from trainmaster.core.errors import Unreachable, UsageError
from trainmaster.core.results import Overall

RESTART = Restart(pod="pod-1", container="sidecar", restarts=1, exit_code=1, reason="Error")
FALLING = [5.0, 4.0, 3.0, 2.5, 2.2, 2.0]


def logs(**more: Any) -> dict[str, PodLog]:
    return {f"pod-{number}": PodLog(lines=9, losses=list(FALLING), **more) for number in (0, 1)}


def healthy(**more: Any) -> Measurements:
    """Everything measured and good; `more` changes one thing."""
    good: dict[str, Any] = {
        "pods_wanted": 2, "pods_running": 2, "running_after_s": 90.0, "nodes": 2, "logs": logs(), "nccl_after_s": 20.0,
        "nccl_from": "NCCL's log", "checkpoint": "/fsx/checkpoints/step-1", "checkpoint_fault": "", "gpu_percent": 96.0,
        "gpu_memory_gib": 21.0, "network_gbps": 92.8, "tokens_per_s": 50_000.0, "baseline_tokens_per_s": 51_000.0,
    }  # fmt: skip
    return Measurements(**{**good, **more})


def flat(value: float) -> dict[str, PodLog]:
    return {"pod-0": PodLog(lines=9, losses=[value] * 6), "pod-1": PodLog(lines=9)}


CASES: list[tuple[str, str, Measurements, str]] = [
    ("nodes_ready", "fail", healthy(not_ready_nodes=["n1"]), "not ready: n1"),
    ("nodes_ready", "fail", healthy(nodes=0, not_ready_nodes=["n1"]), "not ready: n1"),
    ("nodes_ready", "error", healthy(nodes=0), "no node was read"),
    ("pods_running", "fail", healthy(pod_faults={"pod-1": "CrashLoopBackOff"}), "pod-1: CrashLoopBackOff"),
    ("pods_running", "fail", healthy(restarts=[RESTART]), "pod-1: container sidecar was restarted once; it had ended"),
    ("pods_running", "fail", healthy(running_after_s=None, restarts=[RESTART]), "ended with 1 Error"),
    ("pods_running", "fail", healthy(running_after_s=None, pods_running=1), "1 of 2 pods ran"),
    ("pods_running", "fail", healthy(running_after_s=301.0), "later than 300 s"),
    ("loss_falling", "fail", healthy(logs=flat(5.0)), "does not fall"),
    ("loss_falling", "fail", healthy(logs=flat(float("nan"))), "not finite"),
    ("loss_falling", "fail", healthy(logs={"pod-0": PodLog(lines=3, losses=[5.0, float("nan")])}), "not finite"),
    ("loss_falling", "fail", healthy(logs=logs(beat_losses=[float("inf")])), "not finite"),
    ("loss_falling", "error", healthy(logs={"pod-0": PodLog(lines=3, losses=[5.0, 4.0, 3.0])}), "fewer than 4"),
    ("no_nccl_timeout", "fail", healthy(logs=logs(nccl_timeouts=["Watchdog caught"])), "Watchdog caught"),
    ("no_nccl_timeout", "error", healthy(logs={"pod-0": PodLog(lines=9)}), "no whole log of 1 of 2 pods"),
    ("no_nccl_timeout", "error", healthy(logs=logs(whole=False)), "no whole log of 2 of 2 pods"),
    ("nccl_init", "fail", healthy(nccl_after_s=121.0), "above 120 s"),
    ("nccl_init", "error", healthy(nccl_after_s=None), "no time of NCCL's initialisation"),
    ("checkpoint", "fail", healthy(checkpoint=None), "none was written"),
    ("checkpoint", "error", healthy(checkpoint=None, logs={}), "no log of 2 pods was read"),
    ("checkpoint", "fail", healthy(checkpoint_fault="rank-0.bin: other bytes"), "cannot be read"),
    ("checkpoint", "error", healthy(checkpoint_fault=None), "not read back"),
    ("gpu_utilisation", "fail", healthy(gpu_percent=80.0), "not above 80 %"),
    ("gpu_utilisation", "error", healthy(gpu_percent=None), "not measured"),
    ("gpu_memory", "fail", healthy(gpu_memory_gib=32.0), "not below 32 GiB"),
    ("gpu_memory", "error", healthy(gpu_memory_gib=None), "not measured"),
    ("network", "fail", healthy(network_gbps=10.0), "10.0 Gbps between nodes, not above 10"),
    ("network", "fail", healthy(network_gbps=None, network_fault="Watchdog caught"), "Watchdog caught"),
    ("network", "error", healthy(network_gbps=None), "not measured"),
    ("network", "skip", healthy(network_gbps=4.0, efa=False), "4.0 Gbps between nodes; the limit"),
    ("network", "skip", healthy(network_gbps=None, efa=False), "the limit of 10 Gbps is that of EFA"),
    ("network", "skip", healthy(network_gbps=None, pods_wanted=1), "one pod"),
    ("throughput", "fail", healthy(tokens_per_s=40_000.0), "below 90%"),
    ("throughput", "skip", healthy(baseline_tokens_per_s=None), "50,000 tokens/s, not judged"),
    ("no_nccl_timeout", "fail", healthy(logs=logs(faults=["OFI error: x"])), "pod-0: OFI error"),
    ("network", "fail", healthy(wrong_rows=["8 wrong values: 64"]), "wrong values"),
    ("network", "fail", healthy(wrong_rows=["8 wrong values: 64"], efa=False), "wrong values"),
    ("throughput", "error", healthy(baseline_tokens_per_s=float("nan")), "no baseline"),
    ("throughput", "error", healthy(baseline_tokens_per_s=0.0), "no baseline"),
    ("throughput", "error", healthy(tokens_per_s=None), "no rate"),
]


@pytest.mark.parametrize("name", indicators.FULL)
def test_each_indicator_passes_on_a_healthy_cluster(name: str) -> None:
    ((result,), overall) = judge(healthy(), [name])
    assert (result.verdict.value, overall) == ("pass", Overall.PASS), result


@pytest.mark.parametrize(("name", "verdict", "measured", "words"), CASES)
def test_each_indicator_fails_and_is_not_measured(name: str, verdict: str, measured: Measurements, words: str) -> None:
    ((result,), _) = judge(measured, [name])
    (finding,) = result.findings
    assert (finding.verdict.value, words in finding.reason) == (verdict, True), finding


def test_every_indicator_has_a_failed_and_an_unmeasured_case() -> None:
    found = {(name, verdict) for name, verdict, _, _ in CASES}
    assert {name for name, _ in found} == set(indicators.FULL)
    assert {name for name in indicators.FULL if (name, "fail") not in found} == set()
    # All pods not running is itself the failure: there is nothing that could be missing.
    assert {name for name in indicators.FULL if (name, "error") not in found} == {"pods_running"}


def test_a_healthy_cluster_passes_a_bad_one_fails_an_unmeasured_one_is_incomplete() -> None:
    assert judge(healthy(), indicators.FULL)[1] is Overall.PASS
    assert judge(healthy(efa=False, network_gbps=None), indicators.FULL)[1] is Overall.PASS
    assert judge(healthy(network_gbps=None), indicators.FULL)[1] is Overall.INCOMPLETE
    assert judge(healthy(network_gbps=7.2, gpu_percent=None), indicators.FULL)[1] is Overall.FAIL


# In the words of PyTorch's ProcessGroupNCCL, NCCL (before and since 2.28), aws-ofi-nccl, CUDA and the driver.
ERRORS = [
    ("heartbeat monitor", "[rank3]:[F] [PG ID 0 Rank 3] Heartbeat monitor timed out! Process will be terminated after "
     "dumping debug info. workMetaList_.size()=1"),
    ("heartbeat monitor", "[PG 0 Rank 1] First PG on this rank that detected no heartbeat of its watchdog."),
    ("watchdog got stuck", "[PG ID 0 PG GUID 0(default_pg) Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 "
     "seconds without making progress in monitoring enqueued collectives."),
    ("remote error", "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
     "prematurely."),
    ("remote error", "[rank1]:[E1117 10:02:11.553 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 1] "
     "Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a "
     "network error, NCCL version 2.21.5"),
    ("system error", "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:"
     "317, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5"),
    ("system error", "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
     "error."),
    ("internal or CUDA error", "ncclUnhandledCudaError: Call to CUDA function failed."),
    ("internal or CUDA error", "internal error - please report this issue to the NCCL developers"),
    ("completion with error", "n2:5776:5902 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer "
     "10.2.0.5<33092> with error 12, opcode 0, len 0, vendor err 129 (Recv)"),
    ("completion with error", "n1:7:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<4> with status=12 "
     "opcode=0 len=0 vendor err 129 (Recv) localGid ::ffff:1.1.2.2 remoteGids::ffff:1.1.1.4 hca mlx5_1"),
    ("completion with error", "u:319733:319761 [1] transport/net_ib/p2p.cc:648 NCCL WARN NET/IB: Got completion from "
     "peer 10.15.23.13<40554> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RECV_RDMA_WITH_IMM(129) "
     "vendor_err=129 hca mlx5_1"),
    ("completion with error", "transport/net_ib/p2p.cc:783 NCCL WARN NET/IB: ncclIbTest: Got CQE with error "
     "(devIndex=0, req=0x7f, comm=0x7f (recv), wr_id=0, qp_num=26257)"),
    ("OFI error", "l:194:710 [0] cm_req_handle_error_entry:46 NCCL WARN NET/OFI Request 0x7f456c222f60 completed with "
     "error. RC: 103. Error: 4126 (Unresponsive receiver (reachable by EFA device but handshake failed))"),
    ("OFI error", "register_rail_mr_buffer:617 NCCL WARN NET/OFI Unable to register memory (type = 2) for device 4. "
     "RC: -22, Error: Invalid argument"),
    ("OFI error", "NCCL WARN NET/OFI Could not register memory on rail 0 with flag 0"),
    ("OFI error", "NCCL WARN NET/OFI aws-ofi-nccl initialization failed"),
    ("ECC", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
    ("ECC", "NVRM: Xid (PCI:0000:53:00): 94, pid=1, Contained: SM (0x1). RST: No, D-RST: No"),
]  # fmt: skip
# Healthy nodes print these, some of them as warnings.
HARMLESS = (
    "NCCL INFO NET/OFI Selected Provider is efa", "NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct",
    "configure_nvls_option:287 NCCL WARN NET/OFI Could not find ncclGetVersion symbol",
    "NCCL WARN NET/OFI Failed to initialize GDRCopy: Failed to open gdr handle",
    "NCCL WARN NET/OFI Error opening file: /sys/devices/virtual/dmi/id/product_name",
    "NCCL WARN NET/OFI Failed to initialize sendrecv protocol",
    "Heartbeat monitor is enabled", "NET/OFI no errors so far: no error",
    "#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong", "# Out of bounds values : 0 OK",
    "   67108864      16777216     float     sum      -1    812.1   82.63  144.61      0    811.0   82.7  144.8      0",
    "CUDA error checks are off; with TORCH_NCCL_ASYNC_ERROR_HANDLING=1 the process will not wait",
)  # fmt: skip
ROW = HARMLESS[-2]


@pytest.mark.parametrize(("kind", "line"), ERRORS)
def test_an_error_of_a_collective_is_named(kind: str, line: str) -> None:
    log = PodLog()
    log.put(b"2026-01-01T00:00:00Z " + line.encode())
    measured = healthy(logs=logs(faults=log.faults, nccl_timeouts=log.nccl_timeouts))
    ((result,), overall) = judge(measured, ["no_nccl_timeout"])
    assert overall is Overall.FAIL and kind in result.findings[0].reason, (log, result)


def test_lines_of_a_healthy_run_are_no_errors() -> None:
    log = PodLog()
    for line in HARMLESS:
        log.put(line.encode())
    assert (log.faults, log.nccl_timeouts, log.wrong_rows) == ([], [], [])


def test_wrong_values_in_a_table_are_counted() -> None:
    log = PodLog()
    for line in (ROW.replace("144.61      0", "144.61      8"), "# Out of bounds values : 12 FAILED"):
        log.put(line.encode())
    log.put(row(wrong=[{"rank": 1}]))
    assert len(log.wrong_rows) == 3 and log.wrong_rows[0].startswith("8 wrong values: 67108864")


def row(**more: Any) -> bytes:
    return json.dumps({"row": {"ranks": 2, "heard": [0, 1], "busbw_gbps": 11.6, "wrong": [], **more}}).encode()


def test_the_bandwidth_is_read_from_our_sweep_and_from_nccl_tests() -> None:
    log = PodLog()
    for line in (b"[default0]:" + row(), row(heard=[0]), row(wrong=[{"rank": 1}]), b'{"row": 3}', b"{broken"):
        log.put(b"2026-01-01T00:00:00.000000000Z " + line)
    assert (log.busbw_gb_s, log.bandwidth_over) == ([11.6], False)
    log.put(b'{"report": {}}')
    log.put(b"# Avg bus bandwidth    : 92.5 ")
    log.put(b"# Avg bus bandwidth    : nan")
    assert (log.busbw_gb_s, log.bandwidth_over) == ([11.6, 92.5], True)


def test_utilisation_is_read_from_both_places() -> None:
    assert parse_smi(b"97\n12\n") == [97.0, 12.0]
    assert parse_smi(b"97\n[N/A]\n") == []
    assert parse_gpu_metrics([b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 97', b"# HELP"], set()) == [97.0]
    assert parse_gpu_metrics([b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 97', b'DCGM_FI_DEV_GPU_UTIL{gpu="1"} x'], set()) == []


def test_the_bandwidth_job_is_the_training_job_with_another_program() -> None:
    made = manifest.make(nodes=2)
    swept = manifest.bandwidth_job(made)
    assert swept is not None
    job, own = manifest.find_job(swept), manifest.find_job(made)
    assert job is not None and own is not None
    words = manifest.pod_template(job)["spec"]["containers"][0]["command"]
    assert "trainmaster.bench.collectives" in words and "trainmaster.train" not in words
    assert not [one for one in words if one.startswith("--pre-train-script")] and "hyperpodrun" in words
    assert "logMonitoringConfiguration" not in job["spec"]["runPolicy"]
    assert "logMonitoringConfiguration" in own["spec"]["runPolicy"], "the manifest itself is not changed"
    assert manifest.uses_efa(own)
    container = own["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]
    container |= {"command": ["torchrun", "mine.py"], "resources": {}}
    assert manifest.bandwidth_job(made) is None and not manifest.uses_efa(own)


def test_no_percent_that_is_none_counts() -> None:
    """NaN is above no limit and below none; DCGM writes 9223372036854775794 for a value that it does not have."""
    for word in (b"NaN", b"9223372036854775794", b"-1", b"inf"):
        assert parse_smi(b"97\n" + word) == []
        assert (
            parse_gpu_metrics([b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 97', b'DCGM_FI_DEV_GPU_UTIL{gpu="1"} ' + word], set())
            == []
        )


def test_only_the_gpus_of_the_tests_pods_count_where_the_exporter_names_pods() -> None:
    lines = [
        b'DCGM_FI_DEV_GPU_UTIL{gpu="0",exported_pod="pod-0"} 97',
        b'DCGM_FI_DEV_GPU_UTIL{gpu="1",pod="another"} 3',
        b'DCGM_FI_DEV_GPU_UTIL{gpu="2",pod=""} 0',
    ]
    assert parse_gpu_metrics(lines, {"pod-0", "pod-1"}) == [97.0]
    assert parse_gpu_metrics(lines[1:], {"pod-0"}) == []


class Exporters:
    """Two nodes with a pod each; the exporter of the second does not answer."""

    async def list(self, path: str, **params: str) -> Any:
        del path
        pods = [
            {"metadata": {"name": f"dcgm-{node}", "namespace": "gpu"}, "spec": {"nodeName": f"n{node}"}}
            for node in (0, 1)
        ]
        return {"items": pods if params["labelSelector"].startswith("app.kubernetes.io") else []}

    async def lines(self, path: str, params: Any) -> Any:
        del params
        if "dcgm-1" in path:
            raise Unreachable("no answer")
        yield b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 97'


def test_the_gpus_of_one_pod_of_two_are_no_measurement() -> None:
    pods = [
        {
            "metadata": {"name": f"pod-{node}"},
            "status": {},
            "spec": {"nodeName": f"n{node}", "containers": [{"name": "t"}]},
        }
        for node in (0, 1)
    ]
    assert asyncio.run(sample_gpus(Exporters(), "x", pods)) == []  # type: ignore[arg-type]
    assert asyncio.run(sample_gpus(Exporters(), "x", pods[:1])) == [97.0]  # type: ignore[arg-type]


def test_only_an_amount_of_memory_counts() -> None:
    log = PodLog()
    for value in ("0.0", "-1", "true", "null"):
        head = '{"v":1,"ts":"2026-01-01T00:00:00+00:00","seq":1,"phase":"STEP","event":"metrics","data":'
        data = f'{head}{{"memory_gib":{value}}}}}'
        log.put(b"@tm events.jsonl 0 " + data.encode())
    assert log.memory_gib is None


SHAPES: list[tuple[Any, str]] = [
    ([{"kind": "HyperPodPyTorchJob"}], "no metadata.name"),
    ([{"kind": "Job", "metadata": None}], "no metadata.name"),
    ([{"kind": "Job", "metadata": {"name": "x", "labels": ["a"]}}], "metadata.labels is no mapping"),
    ([{"kind": "HyperPodPyTorchJob", "metadata": {"name": "x"}}], "no spec"),
    ([{"kind": "TrainJob", "metadata": {"name": "x"}, "spec": {}}], "no pod template"),
    ([{"kind": "HyperPodPyTorchJob", "metadata": {"name": "x"}, "spec": {"replicaSpecs": []}}], "no replicas"),
    ([{"kind": "HyperPodPyTorchJob", "metadata": {"name": "x"}, "spec": {"replicaSpecs": "two"}}], "no replicas"),
    ([{"kind": "Job", "metadata": {"name": "x"}, "spec": {"template": {"spec": {}}}}], "no list of containers"),
]


@pytest.mark.parametrize(("objects_", "words"), SHAPES)
def test_a_manifest_that_lacks_something_is_refused_with_its_place(objects_: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        objects.prepare(objects_, "default", objects.make_marks("x", None))


@pytest.mark.parametrize("replicas", [0, None, "two", True, -1])
def test_a_job_for_no_pods_is_refused(replicas: Any) -> None:
    """`all 0 pods ran` would be a pass."""
    made = manifest.make(nodes=2)
    manifest.find_checked_job(made)["spec"]["replicaSpecs"][0]["replicas"] = replicas
    with pytest.raises(UsageError, match="whole number of pods"):
        objects.prepare(made, "default", objects.make_marks(manifest.JOB_NAME, None))


@pytest.mark.parametrize("mine", [True, False])
def test_only_the_folder_of_this_test_is_removed_after_reading(mine: bool, tmp_path: Path) -> None:
    """A trainer with a configuration of its own can write into a folder that is called test-… too."""
    folder = objects.checkpoint_folder("0a1b2c") if mine else "test-llama"
    path = tmp_path / folder / "step-20"
    path.mkdir(parents=True)
    job = manifest.find_checked_job(manifest.make(nodes=2))
    pod = helper.reading_pod(job, "x", "default", str(path), folder=objects.checkpoint_folder("0a1b2c"))
    _, *words = pod["spec"]["containers"][0]["command"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["checkpoint"] == str(path)
    assert path.exists() is not mine


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", True),
        ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", True),
        ("rank 3: NCCL timeout in all_reduce", True),
        ("NCCL operation timed out after 1800 s", True),
        ("Setting NCCL timeout to 1800 s", False),
        ("NCCL timeout: 1800000 ms", False),
        ("NCCL timeout = 600", False),
        ("export NCCL_TIMEOUT_MS=600000", False),
    ],
)
def test_a_line_that_states_the_limit_is_no_timeout(line: str, counts: bool) -> None:
    log = PodLog()
    log.put(line.encode())
    assert bool(log.nccl_timeouts) is counts


def test_restarts_of_every_container_are_found_with_their_last_end() -> None:
    ended = {"terminated": {"exitCode": 139, "reason": "Error"}}
    statuses = [
        {"name": "trainer", "restartCount": 0, "lastState": {}, "state": {"running": {}}},
        {"name": "sidecar", "restartCount": 3, "lastState": ended, "state": {"running": {}}},
        {"name": "proxy", "restartCount": 1, "state": {"running": {}}},
    ]
    found = find_restarts({"metadata": {"name": "p"}, "status": {"containerStatuses": statuses}})
    assert [(one.container, one.restarts, one.exit_code, one.reason) for one in found] == [
        ("sidecar", 3, 139, "Error"), ("proxy", 1, None, None),
    ]  # fmt: skip
    assert find_restarts({"metadata": {"name": "p"}}) == []

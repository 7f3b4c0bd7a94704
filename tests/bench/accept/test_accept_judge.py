"""Verdicts of acceptance runs, from records of ranks."""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from trainmaster.bench.accept import rank, workload
from trainmaster.bench.accept.baselines import append, golden_of, load, load_golden, scale
from trainmaster.bench.accept.judge import CHECKS, judge, judge_lost, ran_unjudged
from trainmaster.bench.accept.options import Fault, Options, parse_fault, read_timeout, words
from trainmaster.bench.accept.record import RankRecord
from trainmaster.bench.accept.results import build, percentiles, refuse_folder, summarise
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall, Verdict, judge_overall
from trainmaster.train.parallel.rank_info import RankInfo

OPTIONS = Options(min_throughput=1.0, active_iterations=4)
FLOPS = 24_000_000_000


def record(rank: int, **changes: Any) -> RankRecord:
    plain = RankRecord(
        rank=rank, node=rank // 2, host=f"node{rank // 2}", device="NVIDIA H100 80GB HBM3", gpu=f"GPU-{rank}",
        precision="bf16", backend="nccl", parameters=25_557_032, repeats_s=[1.0], steps_s=[0.25] * 4, alone_s=[0.2] * 4,
        losses=[7.0, 6.0, 5.0, 4.0], parameters_digest="p", gradients_digest="g", gradients_again="g",
        memory_bytes=1 << 30, compiled=True, graphed=True,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def overall(records: list[RankRecord], options: Options = OPTIONS) -> Overall:
    return judge_overall(judge(options, records, flops=FLOPS), planned=CHECKS)


def accused(records: list[RankRecord]) -> set[tuple[str, str | None]]:
    found = judge(OPTIONS, records, flops=FLOPS)
    bad = (Verdict.FAIL, Verdict.WARN, Verdict.ERROR)
    return {(one.check, finding.device) for one in found for finding in one.findings if finding.verdict in bad}


def test_healthy_ranks_pass() -> None:
    assert overall([record(rank) for rank in range(4)]) is Overall.PASS


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"parameters_digest": "other"}, "accept_parameters"),
        ({"gradients_digest": "other", "gradients_again": "other"}, "accept_gradients"),
        ({"gradients_again": "other"}, "accept_gradients"),
        ({"losses": [7.0, math.nan, math.nan, math.nan]}, "accept_loss"),
        ({"losses": [7.0, math.inf, 5.0, 4.0]}, "accept_loss"),
        ({"alone_s": [0.26] * 4}, "accept_stragglers"),
    ],
)
def test_a_rank_with_a_fault_is_named(changes: dict[str, Any], check: str) -> None:
    records = [record(0), record(1), record(2, **changes), record(3)]
    assert accused(records) == {(check, "rank2")}
    assert overall(records) is Overall.FAIL


def test_two_ranks_that_differ_fail_without_a_name() -> None:
    assert accused([record(0), record(1, parameters_digest="other")]) == {("accept_parameters", None)}


def test_gradients_of_other_gpus_are_not_compared() -> None:
    other = record(2, device="NVIDIA A100-SXM4-80GB", gradients_digest="a", gradients_again="a")
    assert accused([record(0), record(1), other]) == set()


@pytest.mark.parametrize(
    "records",
    [
        [record(0), record(2)],
        [record(0), record(0)],
        [record(1), record(0)],
        [record(0), record(1, steps_s=[0.25] * 3)],
    ],
)
def test_a_rank_that_is_missing_or_doubled_is_no_pass(records: list[RankRecord]) -> None:
    assert overall(records) is Overall.INCOMPLETE


def test_no_baseline_of_one_gpu_judges_a_mixture() -> None:
    mixed = [record(0), record(1, device="NVIDIA A100-SXM4-80GB", gradients_digest="a", gradients_again="a")]
    assert overall(mixed, Options(active_iterations=4)) is Overall.INCOMPLETE
    checks = judge(OPTIONS, mixed, flops=FLOPS)
    found = build(OPTIONS, mixed, checks, Overall.PASS, flops=FLOPS)
    assert found["device"] == "NVIDIA H100 80GB HBM3 + NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("why", "verdict"),
    [
        ("ended with 3: error cannot use the data: x.tar.gz: not there", Verdict.ERROR),
        ("ended with 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8 GiB", Verdict.ERROR),
        ("ended by SIGKILL", Verdict.FAIL),
        ("hangs: rank 0 waited for it and ended with 1: Timed out waiting 6000ms", Verdict.FAIL),
    ],
)
def test_only_a_fault_of_the_machine_fails(why: str, verdict: Verdict) -> None:
    (check,) = judge_lost({1: why})
    assert check.verdict is verdict


def test_gpus_that_the_golden_run_did_not_have_are_stated(tmp_path: Path) -> None:
    records = [record(rank) for rank in range(2)]
    checks = judge(OPTIONS, records, flops=FLOPS)
    site = tmp_path / "site.toml"
    append(site, golden_of(build(OPTIONS, records, checks, Overall.PASS, flops=FLOPS), name="first"))
    options = dataclasses.replace(OPTIONS, baselines=str(site))
    swapped = [record(0), record(1, gpu="GPU-new")]
    (found,) = (one for one in judge(options, swapped, flops=FLOPS) if one.check == "accept_regression")
    assert "1 of 2 GPUs were not in it" in found.findings[0].reason


def test_a_floor_keeps_all_its_digits() -> None:
    given = words(Options(min_throughput=1234567.8, learning_rate=0.0123456789, duration_s=3.0))
    assert given == ["--learning-rate", "0.0123456789", "--duration", "3", "--min-throughput", "1234567.8"]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 10**11}, {"timeout_s": 1e300}, {"layers": 10**6}, {"image_size": 10**5}, {"processes": 10**6},
        {"repeats": 10**12}, {"duration_s": 1e14}, {"learning_rate": 1e308}, {"active_iterations": 10**30},
    ],
)  # fmt: skip
def test_numbers_that_no_machine_does_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="write a number"):
        Options(**changes).checked()


def test_without_a_baseline_nothing_passes() -> None:
    options, records = Options(active_iterations=4, num_classes=10), [record(0), record(1)]
    checks = judge(options, records, flops=FLOPS)
    assert judge_overall(checks, planned=CHECKS) is Overall.INCOMPLETE
    assert ran_unjudged(checks), "everything else ran and passed"
    text = summarise(build(options, records, checks, Overall.INCOMPLETE, flops=FLOPS))
    assert "acceptance test: INCOMPLETE (ran, not judged)" in text and "--min-throughput" in text
    assert text.splitlines()[-1].startswith("  passed: accept_ranks, ")


def test_only_a_missing_baseline_is_unjudged() -> None:
    options = Options(active_iterations=4, num_classes=10)
    wrong = [record(0), record(1, losses=[7.0, math.nan, 5.0, 4.0])]
    missing = [record(0), record(2)]
    impossible = [record(rank, repeats_s=[1e-6]) for rank in range(2)]
    for records in (wrong, missing, impossible):
        assert not ran_unjudged(judge(options, records, flops=FLOPS))
    assert not ran_unjudged(judge(OPTIONS, [record(0), record(1)], flops=FLOPS)), "it is judged"
    assert not ran_unjudged(judge_lost({1: "ended with 9"}))


@pytest.mark.parametrize(
    ("device", "scaled"),
    [
        ("NVIDIA A100-SXM4-80GB", 1890), ("NVIDIA H100 80GB HBM3", 4181), ("NVIDIA H200", 5990),
        ("NVIDIA B200", 9983), ("NVIDIA L40S", 1078),
    ],
)  # fmt: skip
def test_a_gpu_without_a_figure_of_its_own_is_judged_by_another_ones(device: str, scaled: int) -> None:
    options = Options(batch_size=64, active_iterations=4, warmup_iterations=0)

    def run(share: float, **changes: Any) -> Verdict:
        # Two ranks of one node: four steps of 64 samples each.
        seconds = 2 * 4 * 64 / (share * 2 * scaled)
        records = [record(rank, node=0, device=device, repeats_s=[seconds], **changes) for rank in range(2)]
        (found,) = (one for one in judge(options, records, flops=FLOPS) if one.check == "accept_throughput")
        assert found.findings[0].values["baseline_samples_per_s"] == pytest.approx(2 * scaled, rel=0.002)
        return found.verdict

    assert [run(share) for share in (0.1, 0.4, 0.6, 1.1)] == ["fail", "warn", "pass", "pass"]


def test_a_smaller_batch_asks_for_less_and_several_nodes_only_warn() -> None:
    records = [record(0, node=0), record(1, node=1)]
    small = scale(Options(batch_size=32), records)
    usual = scale(Options(batch_size=64), records)
    assert small is not None and usual is not None and small.samples_per_s == usual.samples_per_s / 2
    assert scale(Options(batch_size=64, data_mode="cifar10"), records) is None
    assert overall(records, Options(batch_size=64, active_iterations=4)) is Overall.WARN


def test_a_result_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    refuse_folder(tmp_path / "new" / "results.json")
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "results.json"):
        with pytest.raises(UsageError, match="--out"):
            refuse_folder(out)


def test_the_floor_of_the_user_decides() -> None:
    fast = dataclasses.replace(OPTIONS, min_throughput=1e6)
    assert overall([record(0), record(1)], fast) is Overall.FAIL


def test_more_than_the_peak_is_no_measurement() -> None:
    records = [record(rank, repeats_s=[1e-6]) for rank in range(2)]
    assert accused(records) == {("accept_throughput", None)}
    assert overall(records) is Overall.INCOMPLETE


def test_a_lost_rank_fails() -> None:
    assert judge_overall(judge_lost({1: "ended with 9"}), planned=CHECKS) is Overall.FAIL


def test_every_sample_is_counted_once() -> None:
    records = [record(rank, repeats_s=[2.0]) for rank in range(4)]
    document = build(OPTIONS, records, judge(OPTIONS, records, flops=FLOPS), Overall.PASS, flops=FLOPS)
    assert document["total_samples"] == 4 * 32 * 4
    assert document["throughput_samples_per_second"] == 4 * 32 * 4 / 2.0
    assert document["communication_share"] == pytest.approx(0.2)


def test_repeats_and_accumulated_batches_are_counted_once() -> None:
    options = dataclasses.replace(OPTIONS, repeats=2, accumulate=3)
    records = [record(rank, repeats_s=[2.0, 1.0 + rank], steps_s=[0.25] * 8) for rank in range(2)]
    document = build(options, records, judge(options, records, flops=FLOPS), Overall.PASS, flops=FLOPS)
    assert document["global_batch_size"] == 2 * 3 * 32
    assert document["total_samples"] == 2 * 3 * 32 * 8
    assert document["total_time_seconds"] == 2.0 + 2.0  # the slowest rank of each repeat
    assert document["throughput_samples_per_second"] == 2 * 3 * 32 * 8 / 4.0
    assert [one["throughput_samples_per_second"] for one in document["repeats"]] == [2 * 3 * 32 * 4 / 2.0] * 2


def test_the_timeout_of_nccl_is_read() -> None:
    assert read_timeout({}) == 300.0
    assert read_timeout({"NCCL_TIMEOUT_MS": "1500"}) == 1.5
    for text in ("0", "-1", "soon", ""):
        with pytest.raises(UsageError, match="NCCL_TIMEOUT_MS"):
            read_timeout({"NCCL_TIMEOUT_MS": text})


def test_options_are_their_own_command_line() -> None:
    options = Options(
        model="resnet18", batch_size=8, learning_rate=0.1, duration_s=2.5, fault=Fault(kind="slow", rank=1)
    )
    text = "--model resnet18 --batch-size 8 --learning-rate 0.1 --duration 2.5 --inject slow:1:0.3"
    assert words(options) == text.split()
    assert words(Options()) == []


def test_percentiles_are_steps_that_were_measured() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0}


def test_baselines_have_sources() -> None:
    assert load()
    assert all(one.source and one.samples_per_s > 0 for one in load())


def test_the_figures_of_the_earlier_tool_are_shown_and_do_not_judge() -> None:
    """14,000, 50,000 and 8,000 samples/s: without precision and program they are no floor."""
    seed = {(one.model, one.world_size): one for one in load() if "seed" in one.source}
    assert {key: one.samples_per_s for key, one in seed.items()} == {
        ("resnet50", 8): 14_000, ("resnet50", 32): 50_000, ("transformer", 8): 8_000,
    }  # fmt: skip
    assert not any(one.judges for one in seed.values())
    options = Options(batch_size=64, active_iterations=4)
    records = [record(rank) for rank in range(8)]
    document = build(options, records, judge(options, records, flops=FLOPS), Overall.INCOMPLETE, flops=FLOPS)
    assert document["baseline"]["judges"] and document["baseline"]["source"].startswith("scaled from H200")
    (reason,) = (
        finding.reason
        for one in judge(options, records, flops=FLOPS) if one.check == "accept_throughput" for finding in one.findings
    )  # fmt: skip
    assert "beside it: 14,000" in reason


def golden_file(folder: Path, records: list[RankRecord]) -> str:
    plain = dataclasses.replace(OPTIONS, min_throughput=None)
    document = build(plain, records, judge(OPTIONS, records, flops=FLOPS), Overall.PASS, flops=FLOPS)
    append(folder / "site.toml", golden_of(document, name='first "run"'))
    return str(folder / "site.toml")


def test_a_golden_run_is_a_baseline(tmp_path: Path) -> None:
    records = [record(rank) for rank in range(4)]
    site = golden_file(tmp_path, records)
    (golden,) = load_golden(Path(site))
    assert golden.name == 'first "run"'
    assert golden.alone_s == {f"GPU-{rank}": 0.2 for rank in range(4)}
    options = dataclasses.replace(OPTIONS, min_throughput=None, baselines=site)
    assert overall(records, options) is Overall.PASS
    assert overall(records, dataclasses.replace(options, num_classes=10)) is Overall.INCOMPLETE  # another one


def test_a_regression_names_the_figure_and_the_gpu(tmp_path: Path) -> None:
    options = dataclasses.replace(
        OPTIONS, baselines=golden_file(tmp_path, [record(rank) for rank in range(4)]), min_throughput=None
    )
    slower = [record(rank, repeats_s=[1.15], alone_s=[0.218 if rank == 2 else 0.2] * 4) for rank in range(4)]
    found = {one.check: one.findings for one in judge(options, slower, flops=FLOPS)}["accept_regression"]
    reasons = {finding.device: (str(finding.verdict), finding.reason) for finding in found}
    assert reasons[None] == ("fail", f'throughput is 13% worse than in the golden run first "run" of {today()}')
    assert reasons["rank2"][0] == "warn"
    assert reasons["rank2"][1].startswith("GPU-2 on node1 by itself is 8% slower")
    assert set(reasons) == {None, "rank2"}


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def test_a_failed_run_is_no_golden_run() -> None:
    with pytest.raises(UsageError, match="FAIL"):
        golden_of({"overall": "FAIL"}, name="bad")


def test_a_damaged_file_of_golden_runs_is_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text("[[golden]]\nname = 3\n")
    with pytest.raises(UsageError, match=r"site\.toml"):
        golden_file(tmp_path, [record(0)])
    assert path.read_text() == "[[golden]]\nname = 3\n"


@pytest.mark.parametrize("text", ["slow", "melt:1", "flip:-1", "flip:1:0.3", "slow:1:nan", "slow:1:-1", "flip:one"])
def test_a_wrong_injection_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--inject"):
        parse_fault(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 0}, "--batch-size"),
        ({"model": "vgg"}, "--model"),
        ({"data_mode": "mnist"}, "--data-mode"),
        ({"data_mode": "cifar10", "model": "transformer"}, "--data-mode"),
        ({"repeats": 0}, "--repeats"),
        ({"accumulate": 0}, "--accumulate"),
        ({"duration_s": -1.0}, "--duration"),
        ({"workers": -1}, "--workers"),
        ({"precision": "fp8"}, "--precision"),
        ({"backend": "mpi"}, "--backend"),
        ({"learning_rate": math.nan}, "--learning-rate"),
        ({"compile": "yes"}, "--compile"),
        ({"model": "transformer", "width": 10, "heads": 3}, "--width"),
        ({"min_throughput": 0.0}, "--min-throughput"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Options(**changes).checked()


@pytest.mark.slow
def test_gradients_are_compared_with_the_one_attention_that_repeats_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster kernels add in any order on a GPU: a healthy H200 failed."""
    seen: list[tuple[bool, bool]] = []
    kept = workload.loss_of

    def note(*words: Any, **more: Any) -> Any:
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        return kept(*words, **more)

    monkeypatch.setattr(workload, "loss_of", note)
    options = Options(
        model="transformer", layers=1, width=8, heads=1, sequence=4, num_classes=5, batch_size=2, warmup_iterations=1,
        active_iterations=2, compile="off",
    )  # fmt: skip
    alone = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    rank.run(options, alone, show=lambda _: None)
    assert seen == [(False, True)] * 2, "the two passes whose gradients are compared"
    assert torch.backends.cuda.flash_sdp_enabled(), "and afterwards as before"

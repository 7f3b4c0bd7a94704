"""The parts of the probes: they find a flipped bit, pair everybody once, take turns, and count what they should."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.bench import nvml
from trainmaster.bench.probe import _bits, burn, corruption, gemm, memory_pattern
from trainmaster.bench.probe._run import Run
from trainmaster.bench.probe._timing import rates, time_rounds
from trainmaster.bench.probe.p2p import pair_up
from trainmaster.bench.probe.pcie_copy import turn

CPU = torch.device("cpu")


@pytest.fixture
def run() -> Iterator[Run]:
    """A run on the CPU; afterwards torch is as loose as it was."""
    precision = torch.get_float32_matmul_precision()
    yield Run(devices=[CPU])
    torch.set_deterministic_debug_mode("default")
    torch.backends.cudnn.deterministic = False
    torch.set_float32_matmul_precision(precision)


@given(st.integers(min_value=2, max_value=33))
def test_everybody_meets_everybody_once_and_nobody_two_at_once(count: int) -> None:
    rounds = pair_up(count)
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)
    met = [pair for pairing in rounds for pair in pairing]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairing in rounds:
        busy = [gpu for pair in pairing for gpu in pair]
        assert len(busy) == len(set(busy))


@pytest.mark.slow
def test_one_flipped_bit_is_found_and_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = memory_pattern.patterns(False)
    real, written = patterns["0x55"], []

    def damaged(chunk: torch.Tensor, first: int) -> torch.Tensor:
        real(chunk, first)
        written.append(first)
        if written == [0, len(chunk)]:  # the second chunk, when it is written and not when it is compared
            chunk[7] ^= 1 << 40
        return chunk

    monkeypatch.setattr(memory_pattern, "patterns", lambda _: {**patterns, "0x55": damaged})
    memory_pattern.measure(run)
    assert run.results["wrong_words"] == 1
    (wrong,) = run.results["wrong"]
    assert (wrong["pattern"], wrong["chunk"], wrong["words"], wrong["again"]) == ("0x55", 1, 1, 1)
    assert wrong["shown"] == [{"word": 7, "expected": "0x5555555555555555", "read": "0x5555545555555555"}]


@pytest.mark.parametrize("whole", [False, True])
def test_patterns_try_both_values_of_every_bit(whole: bool) -> None:
    ones, zeros = 0, 0
    for fill in memory_pattern.patterns(whole).values():
        for word in fill(torch.empty(128, dtype=torch.int64), 5).tolist():
            ones |= word & (2**64 - 1)
            zeros |= ~word & (2**64 - 1)
    assert ones == zeros == 2**64 - 1


def test_walking_bits_walk_and_addresses_differ() -> None:
    patterns = memory_pattern.patterns(False)
    walked = patterns["walking_one_0"](torch.empty(64, dtype=torch.int64), 0).tolist()
    assert [word & (2**64 - 1) for word in walked] == [1 << bit for bit in range(64)]
    one, other = (patterns["address"](torch.empty(1000, dtype=torch.int64), first) for first in (0, 1000))
    assert len({*one.tolist(), *other.tolist()}) == 2000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so, and takes another way
def test_a_work_that_changes_its_bits_once_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = corruption._WORKS["training"]

    def unsteady(r: Run, size: int) -> tuple[corruption.Work, dict[str, Any]]:
        work, about = real(r, size)
        calls = []

        def once_wrong() -> list[torch.Tensor]:
            calls.append(1)
            found = work()
            if len(calls) == 3:
                _bits.bits(found[0]).view(-1)[11] ^= 1
            return found

        return once_wrong, about

    monkeypatch.setitem(corruption._WORKS, "training", unsteady)
    corruption.measure(run)
    told = run.results["work"]
    assert (told["training"]["different_repeats"], told["training"]["different"]) == (1, 1)
    assert told["gemm"]["different"] == 0


def test_a_digest_sees_one_bit_a_sign_of_zero_and_a_shape_of_nan() -> None:
    plain = torch.tensor([0.0, 1.0, math.nan])
    other_zero, other_nan = plain.clone(), plain.clone()
    other_zero[0] = -0.0
    _bits.bits(other_nan)[2] ^= 1
    assert _bits.digest(plain) == _bits.digest(plain.clone())
    assert len({_bits.digest(t) for t in (plain, other_zero, other_nan)}) == 3
    assert _bits.count_different(plain, plain.clone()) == 0
    assert _bits.count_different(plain, other_zero) == _bits.count_different(plain, other_nan) == 1


@pytest.mark.slow
def test_the_exact_product_has_the_same_bits_in_any_order_of_adding() -> None:
    left, right = (_bits.draw((64, 8192), seed=seed, levels=8, device=CPU).float() for seed in (3, 4))
    order = torch.randperm(8192, generator=torch.Generator().manual_seed(5))
    exact = (left.double() @ right.double().T).float()
    summed = torch.zeros(64, 64)
    for place in order.tolist():
        summed += left[:, place : place + 1] * right[:, place]
    assert torch.equal(summed, exact)


def test_data_is_the_same_everywhere() -> None:
    """Known bits: a torch that draws other whole numbers would make nodes with different torch differ."""
    data = _bits.draw((4, 4), seed=1, levels=_bits.FULL, device=CPU)
    assert torch.equal(data, _bits.draw((4, 4), seed=1, levels=_bits.FULL, device=CPU))
    assert data.dtype is torch.bfloat16
    assert bool((data.abs() <= 1).all())


def test_a_wrong_product_has_a_large_error() -> None:
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    good = gemm.Product(work=lambda: left @ right, left=left, right=right)
    bad = gemm.Product(work=lambda: left @ right.roll(1, 0), left=left, right=right)
    none = gemm.Product(work=lambda: torch.full((64, 64), math.nan), left=left, right=right)
    assert gemm.relative_error(good) < 1e-5
    assert gemm.relative_error(bad) > 0.5
    assert math.isnan(gemm.relative_error(none))


@pytest.mark.parametrize(
    ("wrong", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0"), False),
    ],
)
def test_a_device_that_fails_is_not_one_without_fp8(
    run: Run, monkeypatch: pytest.MonkeyPatch, wrong: Exception, raised: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise wrong

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    draw = torch.randn(2, 16, 16)
    if raised:
        with pytest.raises(type(wrong), match=str(wrong)[:18]):
            gemm._fp8(run, draw)
    else:
        assert gemm._fp8(run, draw) == f"this torch cannot: {wrong}"


def test_rates_take_the_median_of_each_round() -> None:
    found = rates([[1.0, 2.0, 100.0], [1.0, 1.0, 1.0], [4.0, 4.0, 4.0]], 8.0)
    assert found["rounds"] == [4.0, 8.0, 2.0]
    assert (found["best"], found["median"], found["repeats"]) == (8.0, 4.0, 9)


def test_kinds_of_work_take_turns() -> None:
    order: list[str] = []
    timed = time_rounds(CPU, {"a": lambda: order.append("a"), "b": lambda: order.append("b")})
    assert [len(rounds) for rounds in timed.values()] == [3, 3]
    runs = [word for word, before in zip(order, ["", *order], strict=False) if word != before]
    assert runs == ["a", "b"] * 4  # warm-up, then three rounds


def test_alone_waits_for_those_together_and_they_for_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    seen: list[str] = []
    both, entered = threading.Barrier(2), threading.Event()

    def together() -> None:
        with turn("test", alone=False):
            both.wait(timeout=10)  # passes only if the two are inside at once
            entered.set()
            seen.append("together")

    def alone() -> None:
        entered.wait(timeout=10)
        with turn("test", alone=True):
            seen.append("alone")

    threads = [threading.Thread(target=work) for work in (together, together, alone)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(seen) == ["alone", "together", "together"]


class Library:
    """NVIDIA's library as far as a sensor calls it, for machines without one: it answers, refuses or is too old."""

    def __init__(self, **numbers: int | None) -> None:
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        if name not in self._numbers:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            number = self._numbers[name]
            if number is None:
                return 3  # NVML_ERROR_NOT_SUPPORTED
            arguments[-1]._obj.value = number
            return 0

        return call


def test_a_sensor_gives_what_it_can() -> None:
    library = Library(
        nvmlDeviceGetPowerUsage=699_500,
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetTemperature=None,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x44,
    )
    sensor = nvml.Sensor(library, ctypes.c_void_p())
    assert sensor.sample() == {
        "sm_mhz": 1980,
        "memory_mhz": 1980,
        "temperature_c": None,
        "power_w": 699.5,
        "throttle": ["power_cap", "hw_thermal"],
    }
    assert sensor.memory_errors() == {"corrected": None, "uncorrected": None}
    assert nvml.open_sensor(CPU) is None


def test_a_burn_is_summed_up_by_its_beginning_and_its_end() -> None:
    samples = [
        {"at_s": float(s), "tflops": 700.0 if s < 100 else 560.0, "temperature_c": 50 + s // 10, "throttle": reasons}
        for s in range(300)
        for reasons in [["power_cap", "sw_thermal"] if s > 200 else ["power_cap"]]
    ]
    found = burn.summarise(samples)
    assert (found["tflops_cold"], found["tflops_end"], found["temperature_max_c"]) == (700.0, 560.0, 79)
    assert found["throttle"] == {"power_cap": 300, "sw_thermal": 99}
    assert found["power_max_w"] is None

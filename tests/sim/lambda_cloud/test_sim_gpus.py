"""The simulated nvidia-smi: our parser and our checks find healthy GPUs of the type in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines import H200, Machine
from trainmaster import checks as checks_package
from trainmaster.core.gpus import gpus, of_gpu
from trainmaster.node.parse.nvidia_smi import parse
from trainmaster.sim.lambda_cloud.catalog import load_catalog
from trainmaster.sim.lambda_cloud.gpu_answers import answers, make_gpus, render_xml

CHECKS = Path(checks_package.__path__[0])
TYPES = [kind for kind in load_catalog().types.values() if kind.gpus]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_the_xml_of_each_type_is_read_as_its_gpus(kind) -> None:
    made = make_gpus(kind.gpu, kind.gpus, "hardware")
    smi = parse(render_xml(made))
    assert smi.attached == len(smi.gpus) == kind.gpus
    for gpu, found in zip(made, smi.gpus, strict=True):
        assert of_gpu(found.name) is kind.gpu
        assert (found.uuid, found.leaves["serial"]) == (gpu.uuid, gpu.serial)
        assert found.memory_total_mib == pytest.approx(kind.gpu.memory_gb * 1e9 / 2**20, rel=0.08)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.gpus in (1, 8)], ids=lambda kind: kind.name)
def test_no_gpu_check_finds_a_fault(tmp_path: Path, kind) -> None:
    """A recorded machine with these GPUs on its bus, whose nvidia-smi is the simulated one."""
    machine = Machine(tmp_path / "machine", of=H200)
    machine.gpus(kind.gpus)
    for arguments, text in answers(make_gpus(kind.gpu, kind.gpus, "hardware")).items():
        machine.command(f"nvidia-smi {arguments}".strip(), text)
    checks = [path.stem for path in (CHECKS / "gpu").glob("gpu_*.py")]
    assert len(checks) > 10
    found = {name: set(machine.verdicts(name).values()) for name in checks}
    assert {name: verdicts for name, verdicts in found.items() if not verdicts <= {"pass", "skip"}} == {}
    assert sum("pass" in verdicts for verdicts in found.values()) >= 12


def test_hardware_decides_the_serials() -> None:
    model = gpus()["H100-SXM"]
    first, again, other = (make_gpus(model, 8, name) for name in ("a", "a", "b"))
    assert first == again
    assert not {gpu.serial for gpu in first} & {gpu.serial for gpu in other}
    assert len({gpu.uuid for gpu in first}) == 8


def test_nvlinks_are_those_of_the_model() -> None:
    text = answers(make_gpus(gpus()["H100-SXM"], 2, "a"))
    assert text["nvlink -s"].count("GB/s") == 2 * 18
    assert answers(make_gpus(gpus()["A10"], 1, "a"))["nvlink -s"] == ""


@pytest.mark.spawns
def test_the_checks_pass_on_an_instance_and_fail_with_broken_cuda(simulate) -> None:
    account = simulate()
    instance = account.launch(instance_type_name="gpu_8x_h100_sxm5")
    shown = account.wait(instance)
    only = "--only gpu_count --only gpu_compat --only gpu_memory --only gpu_nvlink --only gpu_fabric"
    command = f"COLUMNS=400 PYTHONPATH='{CHECKS.parents[1]}' python3 -m trainmaster check --expect gpus=8 {only}"
    done = account.ssh(shown["ip"], command)
    assert done.returncode == 0, done.stdout + done.stderr
    account.simulator.inject("cuda-broken", instance_id=instance)
    done = account.ssh(shown["ip"], command)
    assert done.returncode == 1 and "couldn't communicate with the NVIDIA driver" in done.stdout

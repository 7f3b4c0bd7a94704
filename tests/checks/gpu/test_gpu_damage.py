"""A value that a GPU check reads and that is damaged is never a pass of that GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from gpu_faults import FABRIC
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import edit_smi, smi_text
from trainmaster import checks
from trainmaster.checks import nvidia
from trainmaster.checks.gpu import gpu_fabric
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding
from trainmaster.node.parse import nvidia_smi

NAMES = [name for name in checks.names() if name.startswith("gpu_")]
SMI = nvidia_smi.parse(edit_smi(smi_text(["0000:10:00.0", "0000:11:00.0"], attached=2), None, FABRIC))
FIRST, SECOND = SMI.gpus
WORDS = ["ERR!", "[Unknown Error]", "", "rubbish", "Yes and No", "-", "GPU is lost", "0x0", "٣", "1e9"]
# What is only kept beside a verdict, or has a second witness, or may be any text.
NOT_JUDGED = {
    ("gpu_model", "serial"),
    ("gpu_vbios", "inforom_version/img_version"),
    ("gpu_vbios", "vbios_version"),
    ("gpu_power", "gpu_power_readings/average_power_draw"),
    ("gpu_peers", "mig_mode/current_mig"),  # gpu_modes judges it
}


class Watched(dict[str, str]):
    """Leaves that remember which of them were looked at."""

    def __init__(self, leaves: Any) -> None:
        super().__init__(leaves)
        self.seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def judge(name: str, gpu: nvidia_smi.Gpu) -> list[Finding]:
    """What a check says of a GPU whose neighbour is healthy."""
    check: Any = checks.load(name)
    smi = replace(SMI, gpus=(gpu, SECOND))
    gpus = nvidia.Gpus(bus=(FIRST.bus, SECOND.bus), devices=(), granted=None, smi=smi, trouble=None)
    data: Any = gpus
    if name == "gpu_nvlink":
        counters = dict.fromkeys(range(18), frozenset({"Replay Errors", "Recovery Errors", "CRC Errors"}))
        links = {each.uuid: check.Links(up=frozenset(range(18)), counters=counters) for each in smi.gpus}
        data = check.Evidence(gpus=gpus, links=links, trouble=None)
    elif name == "gpu_fabric":
        data = check.Evidence(gpus=gpus, service=None)
    elif name == "gpu_compat":
        data = check.Versions(gpus=gpus, torch="cuda = '13.0'\n")
    found = check.judge(data, Expect())
    return [finding for finding in (found if isinstance(found, list) else [found]) if finding.device == "gpu0"]


def read_by(name: str) -> list[str]:
    leaves = Watched(FIRST.leaves)
    judge(name, replace(FIRST, leaves=leaves))
    return sorted(leaves.seen & set(FIRST.leaves))


def places() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        yield from ((name, leaf) for leaf in read_by(name) if (name, leaf) not in NOT_JUDGED)


PLACES = list(places())


def test_the_checks_read_much_of_what_a_gpu_tells() -> None:
    assert len({leaf for _, leaf in PLACES}) > 50


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(("name", "leaf"), PLACES, ids=lambda word: word)
def test_a_damaged_value_is_never_a_pass(name: str, leaf: str) -> None:
    assert {str(finding.verdict) for finding in judge(name, FIRST)} <= {"pass", "skip"}
    for word in WORDS:
        damaged = replace(FIRST, leaves={**FIRST.leaves, leaf: word or "(empty)"})
        verdicts = {str(finding.verdict) for finding in judge(name, damaged)}
        assert verdicts
        assert "pass" not in verdicts, word


# Words that other fields use: where they are not this field's own, nobody knows what they mean.
OTHERS = ("Active", "Not Active", "Yes", "No", "Enabled", "Disabled", "True", "False", "On", "Off", "None", "Healthy")
OWN = [{"Active", "Not Active"}, {"Yes", "No"}, {"Enabled", "Disabled"}]


def own_words(leaf: str) -> set[str]:
    """Words that a field may have, by the one that was recorded."""
    health = gpu_fabric.HEALTHY.get(leaf.rpartition("/")[2], set())
    return set().union(*(words for words in OWN if FIRST.leaves[leaf] in words), {FIRST.leaves[leaf]}, health)


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(("name", "leaf"), PLACES, ids=lambda word: word)
def test_a_word_of_another_field_is_never_a_pass(name: str, leaf: str) -> None:
    for word in (word for word in OTHERS if word not in own_words(leaf)):
        other = replace(FIRST, leaves={**FIRST.leaves, leaf: word})
        assert "pass" not in {str(finding.verdict) for finding in judge(name, other)}, word


@pytest.mark.parametrize(
    ("path", "word", "verdict"),
    [
        ("retired_pages/pending_retirement", "No", "pass"),
        ("retired_pages/pending_retirement", "Yes", "fail"),
        ("retired_pages/pending_retirement", "Active", "error"),
        ("retired_pages/pending_retirement", "Not Active", "error"),
        ("retired_pages/pending_blacklist", "Disabled", "error"),
    ],
)
def test_a_gpu_that_retires_pages_says_yes_or_no(path: str, word: str, verdict: str) -> None:
    counts = {f"retired_pages/{kind}_retirement/retired_count": "0" for kind in ("multiple_single_bit", "double_bit")}
    rest = {leaf: text for leaf, text in FIRST.leaves.items() if not leaf.startswith(("retired", "remapped"))}
    gpu = replace(FIRST, name="Tesla V100-SXM2-32GB", leaves={**rest, **counts, path: word})
    assert [str(finding.verdict) for finding in judge("gpu_retired", gpu)] == [verdict]


MAY_BE_GONE = (
    "clique",
    "cluster",
    "aggregate",
    "repair",
    "_correctable",
    "counters",
    "histogram",
    "gpu_util",
    "health",
    "secded",
    "parity",
    "c2c",  # drivers before 550 do not report it
)
MUST_BE_THERE = [
    (name, leaf)
    for name, leaf in PLACES
    if name in ("gpu_ecc", "gpu_remap", "gpu_throttle", "gpu_pcie", "gpu_fabric")
    and not any(word in leaf for word in MAY_BE_GONE)
]


@pytest.mark.parametrize(("name", "leaf"), MUST_BE_THERE, ids=lambda word: word)
def test_a_value_that_is_gone_is_never_a_pass(name: str, leaf: str) -> None:
    gone = replace(FIRST, leaves={path: said for path, said in FIRST.leaves.items() if path != leaf})
    assert "pass" not in {str(finding.verdict) for finding in judge(name, gone)}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FIRST.leaves)), st.text(max_size=12), min_size=1, max_size=6))
def test_no_text_makes_a_check_fall_over(damage: dict[str, str]) -> None:
    gpu = replace(FIRST, leaves={**FIRST.leaves, **damage})
    for name in NAMES:
        assert judge(name, gpu) or name == "gpu_driver"

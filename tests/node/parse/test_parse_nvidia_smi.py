"""nvidia-smi's XML: a value is there once or the text is refused. (tests/checks/test_nvidia.py has the rest.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.node.parse import ParseError, nvidia_smi

TWO = (Path(__file__).parent / "samples" / "nvidia-smi-2-gpus.xml").read_text()


def test_every_gpu_is_read() -> None:
    smi = nvidia_smi.parse(TWO.encode())
    assert [(gpu.bus, gpu.temperature_c) for gpu in smi.gpus] == [("0000:00:06.0", 38), ("0000:00:07.0", 38)]
    assert smi.attached == 2


def test_a_value_of_another_gpu_does_not_hide_an_error() -> None:
    mixed = TWO.replace("<gpu_temp>38 C</gpu_temp>", "<gpu_temp>38 C</gpu_temp><gpu_temp>ERR!</gpu_temp>", 1)
    with pytest.raises(ParseError, match="gpu_temp is there 2 times"):
        nvidia_smi.parse(mixed)


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe", "\ud800", '<?xml version="1.0" encoding="nonsense"?><a/>', "<a>" * 50_000]
)
def test_what_no_xml_reader_takes_is_refused(raw: str | bytes) -> None:
    with pytest.raises(ParseError):
        nvidia_smi.parse(raw)

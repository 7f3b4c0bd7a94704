"""Every text colour can be read on the ground it stands on, in light and in dark (WCAG AA: 4.5 to 1)."""

from __future__ import annotations

import re

import pytest

from trainmaster.report.html import asset


def palette(dark: bool) -> dict[str, str]:
    css = asset("style.css")
    blocks = re.findall(r":root \{(.*?)\}", css, flags=re.S)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", blocks[0]))
    return {**found, **dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", blocks[1]))} if dark else found


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    if len(digits) == 3:
        digits = "".join(digit * 2 for digit in digits)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read(dark: bool) -> None:
    colours = palette(dark)
    pairs = [(ink, ground) for ink in ("ink", "soft", "faint") for ground in ("paper", "ground", "sunken")]
    pairs += [(tone, f"{tone}-wash") for tone in ("good", "bad", "warn", "live", "idle")]
    pairs += [(tone, "paper") for tone in ("good", "bad", "warn", "live")]
    low = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_curves_stand_out(dark: bool) -> None:
    colours = palette(dark)
    assert min(contrast(colours[name], colours["paper"]) for name in ("s0", "s1")) >= 3


@pytest.mark.parametrize("name", ["style.css", "health/health.css"])
def test_a_sheet_has_two_weights(name: str) -> None:
    assert set(re.findall(r"font-weight: ([^;}]+)", asset(name))) == {"400", "600"}

"""The best time between two saves, and the ETTR to expect at a mean time to failure.

Young (1974) and Daly (2006): with a save that costs training δ and a failure every M on average, least is lost with a
save about every √(2δM). A save in the background costs little and takes long to write: it must be written before the
next begins, and a failure loses what was trained since the newest save that is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", arXiv 2410.21680.
MTTF_H, MTTF_GPUS = 7.9, 1024
MTTF_SOURCE = "7.9 h at 1,024 GPUs, in proportion: Meta's research clusters, arXiv 2410.21680"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What saves and failures cost, in seconds. `hold_s` of training for each save, `write_s` until it is complete,
    `restart_s` from a failure to the next step."""

    hold_s: float
    write_s: float
    restart_s: float


def scale_mttf_s(gpus: int) -> float:
    """Mean time to failure of a job on so many GPUs, if each fails as often as Meta's do."""
    return MTTF_H * 3600 * MTTF_GPUS / gpus


def best_interval_s(costs: Costs, *, mttf_s: float) -> float:
    """Daly's interval between the beginnings of two saves, and not less than a save takes to be written."""
    hold = costs.hold_s
    if hold >= 2 * mttf_s:
        return max(mttf_s, costs.write_s)
    ratio = math.sqrt(hold / (2 * mttf_s))
    best = math.sqrt(2 * hold * mttf_s) * (1 + ratio / 3 + ratio**2 / 9)
    return max(best, costs.write_s, 1e-3)


def expected_ettr(costs: Costs, *, every_s: float, mttf_s: float) -> float:
    """Share of the time that is productive, with a save every so many seconds.

    Between two failures lie M seconds up and a restart. Of M, each save takes its hold, and the failure half an
    interval and the writing of the newest save, which was not complete yet.
    """
    trained = mttf_s * (every_s - min(costs.hold_s, every_s)) / every_s
    lost = every_s / 2 + costs.write_s
    return max(0.0, trained - lost) / (mttf_s + costs.restart_s)

"""How long ranks wait for each other, by what they do."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.schema import YEAR_S, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """A rank that is silent for longer ends the run. TRAINMASTER_COLLECTIVE_TIMEOUT_S overrides the first two."""

    first_step_s: float = field(
        default=1800.0, gt=0, le=YEAR_S, doc="from the start to the end of the first step: meeting, building, compiling"
    )
    # Long enough for the slowest evaluation batch of one rank, short enough that a dead peer costs two minutes.
    step_s: float = field(default=120.0, gt=0, le=YEAR_S, doc="one step, one evaluation batch")
    load_s: float = field(default=3600.0, gt=0, le=YEAR_S, doc="loading a checkpoint, or the weights of init_from")
    save_s: float = field(default=3600.0, gt=0, le=YEAR_S, doc="saving to memory and to the disk, in the background")
    upload_s: float = field(default=21600.0, gt=0, le=YEAR_S, doc="copying a save to a farther tier, in the background")

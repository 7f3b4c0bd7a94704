"""Starts of a drilled program in the folders of its runs, and what was seen of each."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainmaster.core.plan import EVENTS_FILE, Plan, rank_log
from trainmaster.core.spec import Preflight
from trainmaster.drill import attempt as engine
from trainmaster.drill import folders, plan, ranks, readings, storage, witness_log
from trainmaster.drill.attempt import DrillFailed
from trainmaster.drill.estimate import Estimate
from trainmaster.drill.outside import Outside
from trainmaster.drill.plan import LOOK_STEPS, Strike
from trainmaster.drill.record import Attempt, Setup
from trainmaster.drill.witness_log import FOLDER_VARIABLE, STRIKE_VARIABLE

_LOOK_S = 0.05
# Strikes from outside: the witness holds the program for them.
_DO = dict.fromkeys(("term", "launcher", "stop"), "hold") | {name: name for name in plan.STORAGE}


@dataclass(slots=True)
class Starts:
    """Of one drill in a folder. `say` is called with the current activity, its steps done and its steps in all."""

    setup: Setup
    folder: Path
    say: Callable[[str, int, int], None] = lambda *_: None
    estimate: Estimate = field(default_factory=Estimate)
    quiet_s: float | None = None  # how long an attempt may do nothing
    unheard: bool = False  # its saves are known by its files alone
    struck_since: float | None = None  # the first start of the struck run; None: it was not started yet
    _number: int = 0

    def start(
        self,
        run: str,
        label: str,
        *,
        strike: Strike | None,
        steps: int,
        total: int,
        since: int = 0,
        order: Mapping[str, int] | None = None,
        disk: storage.Disk | None = None,
        fewer: bool = False,
    ) -> Attempt:
        """One start in the folders of a run, expected to go on from step `since` and to come to `total`."""
        self._number += 1
        base = self.folder / run
        folder = base / f"attempt-{self._number}"
        witness = folder.with_name(f"{folder.name}-witness")
        witness.mkdir(parents=True)
        # The first start of the struck run has nothing to resume.
        again = None if self.struck_since is None else self.setup.again
        spec = replace(
            self.setup.spec,
            command=again or self.setup.spec.command,
            preflight=Preflight(level=0),
            workdir=None,
            env=self._environment(witness, strike, steps, order or {}),
        )
        halved = ranks.halve(spec) if fewer else None
        spec = halved[0] if halved is not None else spec
        job = Plan(
            attempt=f"{uuid.uuid4()}.1",
            spec=spec,
            folder=str(folder),
            checkpoints=str(base / "checkpoints"),
            work=str(base / "work"),
        )
        grow = self.roots(run) if self.unheard and strike is not None and strike.name == "saving" else ()
        outside = Outside(strike=strike, folder=folder, witness=witness, grow=grow, disk=disk, quiet_s=self.quiet_s)
        label, begun = f"{label}{self.estimate}", time.time()

        def look(agent: int) -> None:
            outside.look(agent)
            self.say(label, since + readings.count_steps(witness), max(total, 1))

        record = engine.run(job, variables={}, look=look, look_s=_LOOK_S)
        ended = time.monotonic()
        if full := engine.no_room(self.folder):
            raise full
        if place := witness_log.read_outside(witness):
            raise DrillFailed(
                f"it saves to {place}, which is outside its working folder, and was ended before it wrote there: "
                "save below TRAINMASTER_CHECKPOINTS, or to a path relative to the working folder"
            )
        message = str(record.get("message", ""))
        codes = engine.exit_codes(record)
        losses, repeated = readings.read_losses(folder / EVENTS_FILE)
        done = Attempt(
            label=label,
            folder=str(folder),
            lives=witness_log.read(witness, ended=strike is None and not outside.hung),
            losses=losses,
            repeated=repeated,
            printed=readings.read_printed(folder / rank_log(0), ended=set(codes) == {0}),
            codes=codes,
            message=message,
            forced="did not end in" in message,
            begun=begun,
            ended=time.time(),
            grace_s=spec.limits.grace_s,
            stop_s=None if outside.stopped_at is None else ended - outside.stopped_at,
            launcher=outside.launcher,
            hung=outside.hung,
            versions=witness_log.read_versions(witness),
            loaded=witness_log.read_loads(witness, base),
            struck=outside.struck or any(witness.glob("struck-*")),
            left=tuple(record.get("evidence", {}).get("would_not_die", [])),
        )
        self.estimate.take(done)
        return done

    def roots(self, run: str) -> tuple[Path, Path]:
        """Folders of a run that may hold its checkpoints."""
        return self.folder / run / "checkpoints", self.folder / run / "work"

    def checkpoints(self, run: str, *, since: float) -> list[folders.Checkpoint]:
        """Checkpoints of a run that it could go on from, the newest first."""
        return folders.list_alike(folders.find_checkpoints(self.roots(run), since=since))

    def written(self, done: Attempt, run: str) -> list[float]:
        """When an attempt wrote its checkpoints, where only their files tell."""
        if not self.unheard:
            return []
        return [checkpoint.at for checkpoint in folders.find_checkpoints(self.roots(run), since=done.begun)]

    def _environment(self, witness: Path, strike: Strike | None, steps: int, more: Mapping[str, int]) -> dict[str, str]:
        own = self.setup.spec.env
        path = [str(self.folder / "witness"), own.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")]
        ours = {"PYTHONPATH": os.pathsep.join(filter(None, path)), FOLDER_VARIABLE: str(witness)}
        if strike is not None:
            when = "save" if strike.name == "saving" else "step"
            order = {
                "when": when,
                "after": steps,
                "rank": strike.rank,
                "do": _DO.get(strike.name, "kill"),
                "look": LOOK_STEPS,
                **more,
            }
            ours[STRIKE_VARIABLE] = json.dumps(order)
        # Where people look at runs, not at drills.
        return {"WANDB_MODE": "offline", **own, **ours}

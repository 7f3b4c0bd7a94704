"""Run a drill: the undisturbed run, the killed run attempt by attempt, the judgement."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.plan import ATTEMPT_VARIABLE, EVENTS_FILE, Plan
from trainmaster.core.results import CheckResult, Finding, Overall, Verdict, error, fail, judge_overall, ok, skip
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.drill import attempt as engine
from trainmaster.drill.attempt import NOT_RUN, DrillFailed
from trainmaster.drill.folders import flip_bit
from trainmaster.node.owner import is_gone, name_process
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.drill import judge, record, sample_log
from trainmaster.train.drill import plan as plans
from trainmaster.train.drill.judge import Damaged, Resume
from trainmaster.train.drill.plan import DrillAttempt, DrillPlan
from trainmaster.train.drill.record import Attempt

_GRACE_S = 10.0  # for ranks whose peer was killed: they hold nothing that anybody wants
CLAIMS = (
    "strikes", "start", "acknowledged", "bound", "losses", "other ranks", "samples", "damage", "end", "in place",
    "processes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kill and its consequences."""

    planned: DrillAttempt
    reached: bool
    died_at: int | None
    resume: Resume | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of a drill."""

    plan: DrillPlan
    rows: tuple[Row, ...]
    results: tuple[CheckResult, ...]
    reference: Attempt | None  # None: it was interrupted in that run
    attempts: tuple[Attempt, ...]
    begun: float  # seconds since 1970
    took_s: float
    interrupted: bool = False

    @property
    def overall(self) -> Overall:
        return judge_overall(self.results, planned=CLAIMS)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM in a drill, of which nothing runs on. `proof`: what was found until then."""

    def __init__(self, proof: Proof) -> None:
        super().__init__()
        self.proof = proof


@dataclass(slots=True)
class Drill:
    """One drill in a folder. `say` is called with the current activity, its steps done and its steps in all."""

    plan: DrillPlan
    folder: Path
    say: Callable[[str, int, int], None] = lambda *_: None
    _left: list[int] = field(default_factory=list)  # processes that would not die
    _damaged: dict[int, Damaged] = field(default_factory=dict)
    _reference: Attempt | None = None
    _attempts: list[Attempt] = field(default_factory=list)

    def run(self) -> Proof:
        """Interrupted with what was found, where Ctrl-C ends it."""
        started = time.monotonic()
        shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else self.folder  # noqa: S108 (made below, mode 0700)
        for left in shared.glob("trainmaster-drill-*"):  # of drills that were killed
            if is_gone(left.name.removeprefix("trainmaster-drill-").partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
        memory = shared / f"trainmaster-drill-{name_process()}-{uuid.uuid4().hex[:12]}"
        starts: list[Attempt] | None = None
        try:
            memory.mkdir(mode=0o700)
            self._reference = self._undisturbed(memory)
            self._strike(memory)
            starts = self._recovered(memory) if self.plan.in_place else []
        except KeyboardInterrupt:
            shutil.rmtree(memory, ignore_errors=True)
            raise Interrupted(self._proof(None, started)) from None
        finally:
            shutil.rmtree(memory, ignore_errors=True)
        return self._proof(starts, started)

    def _proof(self, starts: list[Attempt] | None, started: float) -> Proof:
        """`starts`: of the run that is killed in place; None: the drill was interrupted before its end."""
        took_s = time.monotonic() - started
        rows, results = self._judge(starts)
        return Proof(
            plan=self.plan,
            rows=tuple(rows),
            results=tuple(results),
            reference=self._reference,
            attempts=tuple(self._attempts),
            begun=time.time() - took_s,
            took_s=took_s,
            interrupted=starts is None,
        )

    def _undisturbed(self, memory: Path) -> Attempt:
        config = self._config("reference", memory)
        folder = self.folder / "reference" / "attempt-1"
        done = self._attempt("undisturbed run", folder, config, ranks=self.plan.attempts[0].ranks, variables={})
        if set(done.codes) != {0}:
            raise DrillFailed(
                f"the undisturbed run failed, so there is nothing to compare with: {engine.last_words(folder)}"
            )
        return done

    def _strike(self, memory: Path) -> None:
        config, attempts = self._config("struck", memory), self._attempts
        dice = random.Random(self.plan.seed)  # noqa: S311 (a drill, not a key)
        for number, planned in enumerate(self.plan.attempts):
            if planned.damage and (done := _damage(Path(str(config.checkpoint.folder)), attempts, dice)):
                self._damaged[number] = done
            variables = planned.kill.environment if planned.kill else {}
            what = f"to be killed: {planned.kill}" if planned.kill else "to the end"
            ranks = "rank" if planned.ranks == 1 else "ranks"
            label = f"attempt {number + 1} of {len(self.plan.attempts)} on {planned.ranks} {ranks}, {what}"
            folder = self.folder / "struck" / f"attempt-{number + 1}"
            attempts.append(self._attempt(label, folder, config, ranks=planned.ranks, variables=variables))
            if planned.kill and not attempts[-1].killed:
                break  # it ended, well or badly, before it could be killed: nothing after this is as planned

    def _recovered(self, memory: Path) -> list[Attempt]:
        """One attempt whose ranks are killed again and again, then its agent; and a second one, to the end."""
        config, kills = self._config("recovered", memory, in_place=True), self.plan.in_place
        ranks, starts = self.plan.attempts[0].ranks, list[Attempt]()
        for number, variables in enumerate((plans.join_kills(kills), {}), 1):
            label = f"{len(kills) - 1} kills in place, then the agent" if number == 1 else "resumed after the agent"
            folder = self.folder / "recovered" / f"attempt-{number}"
            last = self._attempt(label, folder, config, ranks=ranks, variables=variables, agent_dies=number == 1)
            starts += record.read_starts(folder / EVENTS_FILE, folder / "samples", ranks=ranks, codes=last.codes)
            if set(last.codes) == {0}:
                break
        return starts

    def _config(self, name: str, memory: Path, *, in_place: bool = False) -> TrainConfig:
        """Every run keeps to the drill's own places: nothing of the user's is read, written or deleted."""
        checkpoint = self.plan.config.checkpoint
        remote = checkpoint.remote
        if remote is not None:
            remote = replace(remote, url=f"{remote.url.rstrip('/')}/drill-{memory.name[-12:]}/{name}")
        return replace(
            self.plan.config,
            recovery=replace(self.plan.config.recovery, in_place=in_place, tries=len(self.plan.in_place) or 1),
            checkpoint=replace(
                checkpoint,
                folder=str(self.folder / name / "checkpoints"),
                memory=replace(checkpoint.memory, folder=str(memory / name)),
                remote=remote,
            ),
        )

    def _attempt(
        self,
        label: str,
        folder: Path,
        config: TrainConfig,
        *,
        ranks: int,
        variables: Mapping[str, str],
        agent_dies: bool = False,
    ) -> Attempt:
        """One start under the agent, as every job has it; whatever happens here, nothing of it runs on."""
        assert config.checkpoint.folder is not None
        spec = JobSpec(
            name="drill",
            resources=Resources(processes_per_node=ranks),
            preflight=Preflight(level=0),
            limits=Limits(grace_s=_GRACE_S),
            train=config,
        )
        plan = Plan(
            attempt=f"{uuid.uuid4()}.1",
            spec=spec,
            folder=str(folder),
            checkpoints=config.checkpoint.folder,
            work=str(Path.cwd()),
        )
        exit_record = engine.run(
            plan,
            variables={**variables, sample_log.WITNESS_VARIABLE: str(folder / "samples")},
            look=lambda _: self.say(label, _steps_done(folder / EVENTS_FILE), config.steps),
            agent_dies=agent_dies,
        )
        if not exit_record:
            self._left += _wait_for_all(plan.mark)
            codes = (-9,) * ranks
        else:
            self._left += exit_record.get("evidence", {}).get("would_not_die", [])
            codes = engine.exit_codes(exit_record)
        self.say(label, config.steps, config.steps)
        return record.read(folder / EVENTS_FILE, folder / "samples", ranks=ranks, codes=codes)

    def _judge(self, starts: list[Attempt] | None) -> tuple[list[Row], list[CheckResult]]:
        plan, reference, attempts = self.plan, self._reference, self._attempts
        every, steps = plan.config.checkpoint.every_steps, plan.config.steps
        # Where training waits for its saves the interval is the bound; otherwise it must be measured and said.
        stated = every if plan.config.checkpoint.mode == "sync" else None
        resumes = judge.list_resumes(attempts, stated=stated, damaged=self._damaged)
        rows = []
        for number, planned in enumerate(plan.attempts):
            if planned.kill is None:
                continue
            happened = number < len(attempts)
            rows.append(
                Row(
                    planned=planned,
                    reached=happened and attempts[number].killed,
                    died_at=attempts[number].last_step if happened else None,
                    resume=resumes[number] if number < len(resumes) else None,
                )
            )
        findings = dict.fromkeys(CLAIMS, NOT_RUN)
        if reference is not None:
            findings |= {
                "start": judge.no_silent_start(resumes),
                "acknowledged": judge.nothing_acknowledged_is_lost(resumes),
                "bound": judge.bounded(resumes, every_steps=every),
                "losses": judge.same_losses(reference, attempts),
                "other ranks": self._other_ranks(reference, attempts),
                "damage": self._damage_found(attempts),
            }
        if starts is None:  # what is open is so because of the interrupt
            is_open = {name for name, finding in findings.items() if finding.verdict is Verdict.ERROR}
            findings |= dict.fromkeys(is_open, NOT_RUN)
        elif reference is not None:
            findings |= {
                "strikes": _kills_done(rows),
                "samples": judge.same_samples(reference, attempts, steps=steps),
                "end": judge.ended(attempts, steps=steps),
                "in place": self._in_place(reference, starts),
                "processes": self._nothing_left(),
            }
        return rows, [judge.as_result(name, finding) for name, finding in findings.items()]

    def _other_ranks(self, reference: Attempt, attempts: list[Attempt]) -> Finding:
        if not self.plan.other_wanted:
            return skip("left out on request", proof="--other 0")
        if self.plan.other is None and self.plan.limit == 1:
            return skip("not tried: a resume on another number of ranks needs two GPUs", proof="this node shows 1 GPU")
        if self.plan.other is None:
            return error(
                "no other number of ranks can share this batch here",
                action="set --other N with a batch_sequences that divides by it, or --other 0 to leave it out",
            )
        return judge.close_losses(reference, attempts)

    def _in_place(self, reference: Attempt, starts: list[Attempt]) -> Finding:
        if not self.plan.in_place:
            return skip("recovery in place is off", proof="the config has recovery.in_place: false")
        return judge.recovered(reference, starts, kills=len(self.plan.in_place) - 1, steps=self.plan.config.steps)

    def _damage_found(self, attempts: list[Attempt]) -> Finding:
        if not self._damaged:
            return error("there were not two checkpoints to damage one of", action="raise steps, or lower --kills")
        return judge.rejected(attempts, self._damaged)

    def _nothing_left(self) -> Finding:
        if self._left:
            return fail(f"processes {self._left} would not die", action="look for a driver that hangs: dmesg")
        return ok("nothing of any attempt runs on")


def _kills_done(rows: list[Row]) -> Finding:
    missed = [str(row.planned.kill) for row in rows if not row.reached]
    if missed:
        return error(f"not killed: {'; '.join(missed)}", action="raise steps, or choose another --seed")
    return ok(f"{len(rows)} kills, each where it was planned")


def _damage(folder: Path, attempts: list[Attempt], dice: random.Random) -> Damaged | None:
    """Flip one bit of the newest checkpoint on disk, and of its copies in memory; None where it is the only one."""
    steps = manifests.list_steps(folder)
    if len(steps) < 2:
        return None
    newest = manifests.path_of(folder, steps[0])
    copies = {
        Path(str(data.get("path")))
        for attempt in attempts
        for data in attempt.named("CHECKPOINT", "saved")
        if data.get("tier") == "memory" and data.get("step", 0) >= steps[0]
    }
    for checkpoint in (newest, *copies):
        if shards := sorted(checkpoint.glob("*.distcp")):
            shard = dice.choice(shards)
            flip_bit(shard, dice.randrange(shard.stat().st_size), dice.randrange(8))
    return Damaged(step=steps[0], path=str(newest))


def _wait_for_all(mark: str) -> list[int]:
    """Wait for the end of what an agent that was killed had started; the processes that are left."""
    until, word = time.monotonic() + _GRACE_S, f"{ATTEMPT_VARIABLE}={mark}".encode()
    while True:
        left = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if word in path.read_bytes().split(b"\0"):
                    left.append(int(path.parent.name))
        if not left or time.monotonic() > until:
            return left
        time.sleep(engine.LOOK_S)


def _steps_done(events: Path) -> int:
    """How far an attempt is: the last step that it reported."""
    try:
        with events.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 14)))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            item = json.loads(line)
            if item["phase"] == "STEP":
                return int(item["data"]["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0

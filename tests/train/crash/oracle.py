"""Live through one case and say which promise was broken, if any."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.results import Finding, Verdict
from trainmaster.core.schema import to_plain
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.drill import judge, record
from trainmaster.train.drill.judge import Damaged
from trainmaster.train.drill.record import Attempt

from . import cases, damage
from .cases import Case
from .store import BUCKET, Store
from .warm import Warm

TIMEOUT_S = "30"


class NotReached(Exception):
    """The case did not happen: nobody was killed, or there was nothing to damage."""


class Broken(Exception):
    """A promise was broken."""


@dataclass(frozen=True, kw_only=True)
class Lived:
    """What a case came to."""

    case: Case
    lost: int
    seconds: float


class Matrix:
    """Runs cases in a folder, one after the other; reference runs are made once."""

    def __init__(self, folder: Path, warm: Warm) -> None:
        self._folder, self._warm = folder, warm
        self._references: dict[int, Attempt] = {}
        self._store: Store | None = None
        self._lived = 0

    def live(self, case: Case) -> Lived:
        """One case from its start to its end; Broken or NotReached say what was not as promised."""
        started = time.monotonic()
        home = self._folder / "case"
        shutil.rmtree(home, ignore_errors=True)
        self._lived += 1
        with self._disk(case, home / "checkpoints") as disk:
            life = self._born(case, home)
            _kill(life, case)
            lost = self._go_on(life, case, disk)
        shutil.rmtree(home)
        return Lived(case=case, lost=lost, seconds=time.monotonic() - started)

    def close(self) -> None:
        if self._store is not None:
            self._store.stop()

    def _born(self, case: Case, home: Path) -> Life:
        if case.damage == damage.STORE:
            if self._store is None:
                self._store = Store(self._folder / "store")
            config = cases.config(mode=case.mode, remote={"url": f"s3://{BUCKET}/case-{self._lived}", "keep": 2})
            return Life(home, self._warm, config, case.ranks, env=self._store.environment)
        if case.tiers:
            config = cases.config(
                mode=case.mode, memory={"use": "on", "every_steps": 1}, remote={"url": str(home / "remote"), "keep": 2}
            )
            return Life(home, self._warm, config, case.ranks, env={"TRAINMASTER_MEMORY": str(home / "memory-{rank}")})
        return Life(home, self._warm, cases.config(mode=case.mode), case.ranks)

    @contextlib.contextmanager
    def _disk(self, case: Case, folder: Path) -> Iterator[damage.Disk | None]:
        if case.damage in damage.PLACES:
            with damage.disk(folder) as disk:
                yield disk
        else:
            yield None

    def _go_on(self, life: Life, case: Case, disk: damage.Disk | None) -> int:
        hurt: dict[int, Damaged] = {}
        starved: set[int] = set()
        if disk is not None:
            assert case.damage is not None
            disk.spoil(case.damage)
            attempt = life.attempt()
            # A full disk may have room for the lock, and for saves once what the killed one left is removed.
            may_begin = case.damage == "full disk" or case.tiers
            _must(may_begin or not attempt.began, "nothing can be saved, and it trained")
            if set(attempt.codes) != {0} or not may_begin:
                _must(set(attempt.codes) == {1}, f"a run that cannot save ended with {attempt.codes}")
                told = bool(attempt.named("CHECKPOINT", "failed"))
                _must(told or not attempt.began, "a failed save was not told")
                _must(cases.STEPS not in attempt.saved, "it said to have saved its end, and failed")
            starved.add(len(life.attempts) - 1)
            disk.mend()
        elif case.damage in damage.FILES:
            hurt = _damage(life, case)
            if case.every_one:
                attempt = life.attempt()
                _must(set(attempt.codes) == {66}, f"nothing good is left, and it ended with {attempt.codes}")
                _must(not attempt.began, "nothing good is left, and it trained")
                return 0
        elif case.damage == damage.STORE:
            self._without_store(life)
            return self._judge(life, hurt, starved, remote=True)
        life.attempt()
        return self._judge(life, hurt, starved)

    def _without_store(self, life: Life) -> None:
        """The store is down; then the disk is lost too; then the store is back."""
        assert self._store is not None
        uploaded = max((step for attempt in life.attempts for step in attempt.saved_to("remote")), default=None)
        if uploaded is None:
            raise NotReached("nothing was uploaded before the kill")
        self._store.stop()
        try:
            attempt = life.attempt()
            _must(attempt.began, "a store that is down kept the run from going on, although the disk is there")
            _must(set(attempt.codes) <= {0, 1}, f"without its store the run ended with {attempt.codes}")
            _must(attempt.last_step == cases.STEPS, f"without its store the run ended at step {attempt.last_step}")
            told = {data.get("tier") for data in attempt.named("CHECKPOINT", "failed")}
            _must("remote" in told, "uploads failed and nobody said so")
            _must(not attempt.saved_to("remote"), "it said to have uploaded to a store that is down")
            shutil.rmtree(life.checkpoints)
            refused = life.attempt()
            _must(not refused.began, "the disk is gone, the store cannot be asked, and it began")
            _must(not {0, 75} & set(refused.codes), f"the store cannot be asked, and it ended with {refused.codes}")
        finally:
            self._store.start()
        back = life.attempt()
        _must((back.resumed_from or 0) >= uploaded, f"{uploaded} was uploaded, it went on from {back.resumed_from}")

    def _judge(self, life: Life, hurt: dict[int, Damaged], starved: set[int], *, remote: bool = False) -> int:
        reference, attempts = self._reference(life.ranks), life.attempts
        checkpoint = life.config.checkpoint
        stated = cases.EVERY if checkpoint.mode == "sync" and checkpoint.memory.use != "on" else None
        resumes = judge.list_resumes(attempts, stated=stated, damaged=hurt)
        for finding in (
            judge.ended(attempts, steps=cases.STEPS),
            _unless_nothing_saved(judge.no_silent_start(resumes)),
            _unless_nothing_saved(judge.nothing_acknowledged_is_lost(resumes if not remote else resumes[:-2])),
            # A disk that takes no save holds no bound; that its failures are told was asked above.
            _unless_nothing_saved(
                judge.bounded(
                    # The disk of a store's case is lost at the end: what it went back to was asked there.
                    [one for place, one in enumerate(resumes[:-2] if remote else resumes) if place not in starved],
                    every_steps=cases.EVERY,
                )
            ),
            judge.same_losses(reference, attempts),
            judge.same_samples(reference, attempts, steps=cases.STEPS),
            judge.rejected(attempts, hurt),
        ):
            _must(finding.verdict in (Verdict.PASS, Verdict.SKIP), finding.reason)
        for step in manifests.list_steps(life.checkpoints):
            path = manifests.path_of(life.checkpoints, step)
            # A rejected one stays for a person to look at, until the run has passed it or taken its place.
            if str(path) not in {one.path for one in hurt.values()}:
                fault = manifests.find_fault(path, manifests.read(path).files, deep=True)
                _must(fault is None, f"{path.name} is left behind damaged: {fault}")
        left = [entry.name for entry in life.checkpoints.iterdir() if entry.name.endswith((".tmp", ".old"))]
        _must(not left, f"left behind: {left}")
        return max((one.lost for one in resumes if one.began), default=0)

    def _reference(self, ranks: int) -> Attempt:
        if ranks not in self._references:
            home = self._folder / f"reference-{ranks}"
            life = Life(home, self._warm, cases.config(), ranks)
            attempt = life.attempt()
            assert set(attempt.codes) == {0}, (home, attempt.codes)
            self._references[ranks] = attempt
        return self._references[ranks]


class Life:
    """One run's folder and its attempts so far."""

    def __init__(
        self, home: Path, warm: Warm, config: TrainConfig, ranks: int, *, env: Mapping[str, str] | None = None
    ) -> None:
        self.home, self.config, self.ranks, self.attempts = home, config, ranks, list[Attempt]()
        self.checkpoints = home / "checkpoints"
        self._warm, self._env = warm, dict(env or {})
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.json").write_text(json.dumps(to_plain(config)))

    def attempt(self, **env: str) -> Attempt:
        folder = self.home / f"attempt-{len(self.attempts) + 1}"
        ours = {
            "TRAINMASTER_EVENTS": folder / "events.jsonl", "TRAINMASTER_CHECKPOINTS": self.checkpoints,
            "TRAINMASTER_WITNESS": folder / "samples", "TRAINMASTER_COLLECTIVE_TIMEOUT_S": TIMEOUT_S,
        }  # fmt: skip
        environment = {**{name: str(value) for name, value in ours.items()}, **self._env, **env}
        codes = self._warm.run(folder, self.home / "config.json", ranks=self.ranks, env=environment)
        found = record.read(folder / "events.jsonl", folder / "samples", ranks=self.ranks, codes=codes)
        self.attempts.append(found)
        return found


def _kill(life: Life, case: Case) -> None:
    strike = {"TRAINMASTER_KILL_AT": f"{case.place} {case.when}"}
    if case.rank is not None:
        strike["TRAINMASTER_KILL_RANK"] = str(case.rank)
    if case.term:
        strike["TRAINMASTER_TERM_AT"] = case.term
    if case.loads or (case.damage and case.damage not in damage.PLACES):
        # Ended by a stop at a step that no other save falls on: there are two to load, in every tier.
        stopped = life.attempt(TRAINMASTER_TERM_AT=f"step:start {8 if case.loads else 5}")
        _must(set(stopped.codes) == {75}, f"told to stop it ended with {stopped.codes}")
    attempt = life.attempt(**strike)
    if not attempt.killed:
        raise NotReached(f"nobody was killed: {attempt.codes}")
    _must(999 not in attempt.codes, "a rank hung after its peer was killed")


def _damage(life: Life, case: Case) -> dict[int, Damaged]:
    assert case.damage is not None
    dice = random.Random(case.seed)
    steps = manifests.list_steps(life.checkpoints)
    if len(steps) < 2:
        raise NotReached(f"only {len(steps)} checkpoints to damage")
    for step in steps if case.every_one else steps[:1]:
        damage.FILES[case.damage](manifests.path_of(life.checkpoints, step), dice)
    newest = manifests.path_of(life.checkpoints, steps[0])
    return {len(life.attempts): Damaged(step=steps[0], path=str(newest))}


def _unless_nothing_saved(finding: Finding) -> Finding:
    """Killed before the first save there is nothing to lose: not a hole in the proof, a case of its own."""
    return replace(finding, verdict=Verdict.SKIP) if finding.verdict is Verdict.ERROR else finding


def _must(fact: bool, otherwise: str) -> None:
    if not fact:
        raise Broken(otherwise)

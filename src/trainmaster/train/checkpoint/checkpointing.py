"""The run's checkpoints as the loop sees them: when a save is due, what was kept, and what is said of it."""

from __future__ import annotations

from trainmaster.train.checkpoint.protocol import Checkpoints, Ended, Failed, Loaded, Saved
from trainmaster.train.checkpoint.tiers.loss_bound import Bound
from trainmaster.train.run_log import RunLog
from trainmaster.train.state import State


class Checkpointing:
    """Begins saves, waits for them where it must, and tells of each."""

    def __init__(self, checkpoints: Checkpoints, run_log: RunLog) -> None:
        self._checkpoints, self._run_log = checkpoints, run_log
        self.newest: str | None = None  # checkpoint of this run
        self.saved_step: int | None = None
        self._begun_step: int | None = None  # the newest save that was begun
        self._waits: int | None = None  # the step whose save waits for the one before it
        self._bound: Bound | None = None  # what was last said of it
        self._failed: list[str] = []  # since the last save that was kept
        self._failing: dict[str, str] = {}  # tier → why its last save failed

    def load(self) -> Loaded | None:
        """Fill the run from the newest good checkpoint, if there has ever been one."""
        loaded = self._checkpoints.resume()
        self._waits = None
        if loaded is not None:
            self.newest = loaded.path
            self.saved_step = self._begun_step = loaded.state.step
        return loaded

    def wants(self, step: int, *, last: bool) -> bool:
        """Whether to begin a save at this step. While another is under way it waits for a later step boundary."""
        due = self._checkpoints.due(step) or last
        if self._waits is None and step != self._begun_step and due:
            self._waits = step
        return self._waits is not None and not self._checkpoints.busy

    def begin(self, state: State) -> None:
        """A save of this step: the copy is begun, not awaited."""
        every, late = self._checkpoints.every_steps, state.step - (self._waits or state.step)
        if late:
            self._run_log.line(
                f"saves take longer than the {every} steps between them: step {state.step} is saved instead of "
                f"{state.step - late}; checkpoint.every_steps: {every + late} would hold"
            )
        self._waits, self._begun_step = None, state.step
        self._checkpoints.save(state)
        self.report_ended()

    def before_update(self) -> None:
        self._checkpoints.before_update()

    def report_ended(self) -> None:
        """Log the saves that ended since the last call."""
        self._tell(self._checkpoints.collect_finished())

    def hold_bound(self, step: int) -> None:
        """Let no step begin that could make a crash cost more than was said: a save that is late is waited for.

        The times that a bound is made from are of the past, and a promise is about the next save.
        """
        held = self._bound.losses["process"].lost_steps if self._bound is not None else None
        if held is not None:
            self._tell(self._checkpoints.hold(step + 1 - held))

    def finish(self, patience_s: float | None = None) -> None:
        """Wait for everything under way."""
        self._tell(self._checkpoints.finish(patience_s=patience_s))

    def close(self) -> None:
        """Release the lock of the checkpoints; the last call."""
        self._checkpoints.close()

    def keep_last(self, state: State) -> str | None:
        """See to it that this step is kept; why it could not be, or None."""
        self.finish()
        if state.step != self.saved_step:
            self._failed.clear()
            self._checkpoints.save(state)
        self.finish()  # now that nothing more comes, far tiers are waited for too
        return None if state.step == self.saved_step else "; ".join(self._failed)

    def _tell(self, ended: list[Ended]) -> None:
        """Say which saves were committed and which failed; after a failure the one before is still there."""
        for save in ended:
            if isinstance(save, Saved):
                self._log_saved(save)
            else:
                self._log_failed(save)
        bound = self._checkpoints.bound
        if bound is None:
            return
        bound = bound.without(self._failing)
        if bound.differs(self._bound):
            self._bound = bound
            self._run_log.loss_bounded(bound.event(), bound.lines())

    def _log_saved(self, saved: Saved) -> None:
        self._failing.pop(saved.tier, None)
        if saved.kept:
            self.newest, self.saved_step = saved.path, saved.step
        self._run_log.checkpoint_saved(
            step=saved.step,
            path=saved.path,
            tier=saved.tier,
            size_bytes=saved.size_bytes,
            seconds=saved.seconds,
            stall_s=saved.stall_s,
        )
        if saved.warning is not None:
            self._run_log.line(saved.warning)

    def _log_failed(self, failed: Failed) -> None:
        self._failed.append(failed.why)
        self._failing[failed.tier] = failed.why
        self._run_log.checkpoint_failed(step=failed.step, tier=failed.tier, why=failed.why)

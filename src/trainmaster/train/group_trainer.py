"""The trainer of a replica group: the loop of every run, and between the groups what keeps them one run.

Inside of a group everything is as in a run of its own. A step sums gradients and loss over the groups before the
update, and a group makes the update only after a whole sum. After a loss the groups that are left meet in the next
epoch, the newest state among them is copied to those that are behind, and the step is made again, its micro-batches
divided anew. A group that comes back has no state, and is behind like any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainmaster.core.schema import build, to_plain
from trainmaster.node.quorum import NOTHING, Quorum, View
from trainmaster.train.compute import forward_backward
from trainmaster.train.feed import Batch, StoppedWaiting
from trainmaster.train.loop import Trainer, TrainingFailed
from trainmaster.train.metrics.async_scalars import StepInFlight
from trainmaster.train.metrics.trackers import open_trackers
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.between import Between, PeerLost
from trainmaster.train.parallel.division import Division
from trainmaster.train.state import State
from trainmaster.train.watch.bad_steps import Decision

_LOOK_S = 0.02
_MOST_BROKEN = 10  # epochs in a row without a step, after which it is no loss but a fault


class GroupTrainer(Trainer):
    """One group of a run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        info, limits = self.world.rank_info, self.config.timeouts
        assert self.world.quorum is not None
        self.quorum = Quorum(self.world.quorum)
        # Others save and load while this group waits for them.
        step_s = max(limits.first_step_s, limits.step_s)
        self.between = Between(self.quorum, info, step_s=step_s, copy_s=max(step_s, limits.load_s))
        self.division = Division.of(self.config, info)
        self.feed.stopping = self.runs_ahead = False  # the groups stop together, after a step that is accounted for
        self.view: View | None = None
        self.epoch = 0
        self.is_whole = False  # whether this group has a state that counts
        self.regroups, self.leads = True, False
        self.broken = 0
        self.job: str | None = None
        self.failed_at: float | None = None  # of the loss since which no step was made
        self.parts: dict[str, float] = {}  # of the pause that follows it
        self.is_over = False  # another group has made the last step and saved it

    # Start and end.

    def resume(self, job: str | None = None) -> None:
        """Meet the other groups, and take over their state; where none has any, the lead loads it."""
        self.job = job
        self.feed.stopping = not self.regroup()
        if self.feed.stopping and not self.is_over:
            raise StoppedWaiting("stop request before the groups had met")

    def train(self) -> bool:
        return super().train() and not self.is_over

    def end_start(self) -> None:
        if self.state.step != (self.resumed_from or 0):  # else it was stopped before its first step
            super().end_start()

    def save_if_due(self) -> None:
        if self.leads:
            super().save_if_due()

    def save_after_data_error(self) -> None:
        if self.leads:
            super().save_after_data_error()
        else:
            self.close_after_failure()

    def finish(self, stopped: bool) -> None:
        if self.leads:
            super().finish(stopped)
            return
        self.checkpointing.close()
        self.feed.close()
        self.say_end(stopped="with the other groups" if stopped else None)

    # A step.

    def step(self) -> None:
        """Make one step together; made again with those that are left for as long as a group is lost in it."""
        while True:
            if self.regroups:
                if not self.regroup():
                    self.feed.stopping = True
                    return
                self.skip_excluded_samples()
                self.feed.ready(self.state.cursor)
            try:
                super().step()
            except PeerLost:
                self.give_up_epoch()
                continue
            self.broken = 0
            self.tell_pause()
            return

    def compute(self, batches: Sequence[Batch]) -> Tensor:
        """Gradients and loss of the step, summed over the groups."""
        state, info, view = self.state, self.world.rank_info, self.view
        assert view is not None
        self.sample_log.note_passes(batches, self.passes, step=state.step + 1, cursor=state.cursor, epoch=view.epoch)
        loss = rank_sync.mean(
            forward_backward(self.model, batches, over_groups=self.add_over_groups, passes=self.division.count)
        )
        gradients = [_local(weight.grad) for weight in self.model.parameters() if weight.grad is not None]
        newest = self.quorum.read().epoch if info.rank == 0 else view.epoch
        words = torch.tensor([float(loss), self.stop.asked() is not None, newest > view.epoch])
        flat = torch.cat([*(part.detach().float().flatten() for part in gradients), words.to(self.world.device)]).cpu()
        stop, newer = self.together(partial(self.between.add, flat), lambda: (flat[-2] > 0, flat[-1] > 0))
        self.feed.stopping, self.regroups = stop, newer
        for part, total in zip(gradients, torch.split(flat[:-3], [part.numel() for part in gradients]), strict=True):
            part.copy_(total.view_as(part))
        self.sample_log.note_made(step=state.step + 1, epoch=view.epoch)
        return flat[-3].to(self.world.device, copy=True)

    def add_over_groups(self, total: Tensor) -> None:
        self.together(partial(self.between.add, total))

    def together(self, act: Callable[[], None], flags: Callable[[], Sequence[Tensor]] = lambda: ()) -> list[bool]:
        """Act towards other groups on every rank of this one; PeerLost on all if any failed. Returns flags of any."""
        failed = False
        try:
            act()
        except PeerLost:
            failed = True
        failed, *found = rank_sync.any_of([failed, *(bool(flag) and not failed for flag in flags())])
        if failed:
            raise PeerLost
        return found

    def roll_back(self, flight: StepInFlight, decision: Decision) -> None:
        """The lead loads, and the others take over what it has: all of them decide alike, after the same step."""
        assert self.view is not None
        if self.leads:
            super().roll_back(flight, decision)
        else:
            self.is_whole = False
        self.together(partial(self.copy_state, self.view.lead))
        self.is_whole = True
        self.resume_meter()

    # Epochs.

    def regroup(self) -> bool:
        """Meet in the newest epoch, at the start of a step; False on a stop request, or where the run is over."""
        self.regroups = True
        while True:
            view = self.await_epoch()
            if view is None:
                return False
            self.epoch = view.epoch
            try:
                if not self.meet(view):
                    continue
            except PeerLost:
                self.view = view
                self.give_up_epoch()
                continue
            self.regroups = False
            return True

    def await_epoch(self) -> View | None:
        """The next epoch with this group as a member; None on a stop request, or where the run is over."""
        info, is_ready = self.world.rank_info, False
        while True:
            view: View = rank_sync.on_first(self.quorum.read)
            is_member = view.has(info.group, info.restart)
            self.is_over = view.finished
            if view.finished or rank_sync.any_rank(self.stop.asked() is not None):
                return None
            if is_member and view.epoch > self.epoch:
                return view
            if not is_member and not is_ready and info.rank == 0:
                self.quorum.say_ready(info.group, info.restart)
                is_ready = True
            time.sleep(_LOOK_S)

    def meet(self, view: View) -> bool:
        """Meet the members of an epoch, at the newest state that one of them has; False if there is a newer epoch."""
        info, began = self.world.rank_info, time.time()
        if info.rank == 0:
            self.quorum.say_at(view, info.group, self.state.step if self.is_whole else NOTHING)
        while (steps := rank_sync.on_first(partial(self.quorum.steps, view))) is None:
            if rank_sync.on_first(lambda: self.quorum.read().epoch > view.epoch):
                return False
            time.sleep(_LOOK_S)
        self.together(partial(self.between.connect, view))
        newest, met = max(steps.values()), time.time()
        source = view.lead if newest == NOTHING else min(group for group, step in steps.items() if step == newest)
        if newest == NOTHING and source == info.group:
            super().resume(self.job)
        if newest == NOTHING or min(steps.values()) < newest:
            self.is_whole = self.is_whole and steps[info.group] == newest
            self.together(partial(self.copy_state, source))
            if steps[info.group] != newest and newest != NOTHING:
                self.resumed_from, self.resumed_tier = self.state.step, "peer"
        before, self.is_whole, self.view = self.view, True, view
        self.passes = self.division.passes(self.division.share(list(view.members), info.group), info.rank)
        self.feed.divide(self.passes)
        self.take_lead(view)
        if before is not None and len(view.members) > len(before.members) and self.leads and info.rank == 0:
            self.run_log.line(f"{len(view.members)} of {info.groups} groups train again, after step {self.state.step}")
        if view.lost_at is not None:
            self.failed_at = self.failed_at or view.lost_at
            self.parts["seen"] = max(0.0, began - self.failed_at)
            self.parts |= {"meet": met - began, "copy": time.time() - met}
        self.resume_meter()
        return True

    def give_up_epoch(self) -> None:
        """Drop what was computed in this epoch, and say that it is broken: whoever waits in it gives up too."""
        self.optimizer.zero_grad(set_to_none=True)
        self.regroups, self.broken = True, self.broken + 1
        assert self.view is not None
        if self.world.rank_info.rank == 0:
            self.quorum.say_broken(self.view, self.world.rank_info.group)
        if self.broken >= _MOST_BROKEN:
            raise TrainingFailed(f"the groups could not reach each other in {self.broken} epochs in a row")

    def take_lead(self, view: View) -> None:
        """Save and write events from now on, if this group leads."""
        before, self.leads = self.leads, view.lead == self.world.rank_info.group
        self.run_log.lead(self.leads)
        if self.leads and not before and self.world.rank_info.rank == 0:
            self.run_log.track(open_trackers(self.config.watch, to_plain(self.config), self.run_log.alarm))
            self.run_log.line(f"group {view.lead} leads: it saves and writes events")

    def tell_pause(self) -> None:
        """The first step after a loss is made."""
        if self.failed_at is None or self.view is None:
            return
        seconds = time.time() - self.failed_at
        parts = {**self.parts, "step": seconds - sum(self.parts.values())}
        self.run_log.survived(
            groups=len(self.view.members),
            of=self.world.rank_info.groups,
            step=self.state.step,
            seconds=round(seconds, 3),
            parts={name: round(took, 3) for name, took in parts.items()},
        )
        self.failed_at, self.parts = None, {}

    # State.

    @torch.no_grad()
    def copy_state(self, source: int) -> None:
        """Copy the state of one group into every other: weights, moments, and where the run is."""
        text = self.between.copy_bytes(json.dumps(to_plain(self.state)).encode(), source=source)
        self.state = build(State, json.loads(text))
        for tensor in self.tensors():
            self.between.copy(tensor, source=source)

    def tensors(self) -> list[Tensor]:
        """This rank's part of weights and optimizer state, in the same order in every group."""
        found = [_local(tensor) for tensor in self.model.state_dict().values()]
        for weight in self.model.parameters():
            if not self.optimizer.state[weight]:  # as AdamW begins it, at the first update
                zeros = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                step = torch.zeros((), dtype=torch.float32, device=self.world.device)
                self.optimizer.state[weight] = {"step": step, **zeros}
            found += [_local(value) for _, value in sorted(self.optimizer.state[weight].items())]
        return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""One replica group of one rank under torchft, on the model and the data of a config of ours; torchrun starts it.

    torchrun … benchmarks/recovery_torchft_rank.py FOLDER     FOLDER has config.json; recovery_torchft.py writes it

Manager, gloo, DistributedDataParallel, Optimizer, DistributedSampler and settings are those of torchft's train_ddp
example; the position of the data is kept after every step, as torchft's documentation recommends (KEEP_DATA=0: not
kept, as in the example itself). All groups begin with the weights of one seed, so none is copied at step 0.

Appended to FOLDER/group-N.jsonl: `pid` at a start; the samples of every batch before they are used; after them what the
Manager says of the step. The first group writes the held-out loss of the last weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import PGTransport  # type: ignore[import-not-found]

from trainmaster import datasets
from trainmaster.core.config.schedule import learning_rate
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.schema import build
from trainmaster.models import family
from trainmaster.train.optimizer import build_optimizer

GROUPS = 2
ALL_HERE_S = 120.0  # in which all groups have to be there, before the first step of the run


class Samples(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples by number, twice as many as a run needs: a group whose peer is away goes further than its share."""

    def __init__(self, config: TrainConfig) -> None:
        shape = datasets.Shape(sequence_tokens=config.sequence_tokens, batch_sequences=config.batch_sequences)
        self.source, self.count = datasets.load(config.data, shape), 2 * config.steps * config.batch_sequences

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        row = self.source.rows([number], held_out=False)
        return number, row.tokens[0], row.targets[0]


class Group:
    """The model, its optimizer and the data of one group, under torchft's Manager."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.log = folder / f"group-{number}.jsonl"
        self.position = folder / f"data-{number}.pt"
        self.config = config = build(TrainConfig, json.loads((folder / "config.json").read_text()))
        self.data = Samples(config)
        sampler = DistributedSampler(
            self.data, replica_rank=number, num_replica_groups=GROUPS, group_rank=0, num_replicas=1, shuffle=False
        )
        self.loader = StatefulDataLoader(self.data, batch_size=config.batch_sequences // GROUPS, sampler=sampler)
        pg = ProcessGroupGloo(timeout=timedelta(seconds=5))
        self.manager = Manager(
            pg=pg,
            min_replica_size=1,
            load_state_dict=self.load,
            state_dict=lambda: {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()},
            replica_id=f"group_{number}",
            timeout=timedelta(seconds=30),
            checkpoint_transport=PGTransport(pg, timeout=timedelta(seconds=10), device=torch.device("cpu")),
            hostname="localhost",
            init_sync=False,
        )
        decoder = family.build(config.model, max_tokens=config.sequence_tokens)
        decoder.init_weights(config.seed)
        inner = build_optimizer(decoder, config.optimizer)
        # A group that is healed takes over its peer's last rate with the state: the rate is set after that.
        inner.register_step_pre_hook(lambda *_: self.set_rate(inner))
        self.model, self.optimizer = DistributedDataParallel(self.manager, decoder), Optimizer(self.manager, inner)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])

    def set_rate(self, inner: torch.optim.Optimizer) -> None:
        """The Manager has counted the step already."""
        rate = learning_rate(self.config.optimizer, step=self.manager.current_step() - 1, steps=self.config.steps)
        for group in inner.param_groups:
            group["lr"] = rate

    def train(self, *, keeps_data: bool) -> None:
        if keeps_data and self.position.exists():
            self.loader.load_state_dict(torch.load(self.position))
        for numbers, tokens, targets in self.loader:
            self.say(given=numbers.tolist())
            self.optimizer.zero_grad()
            loss = self.model(tokens, targets=targets) / (targets != datasets.NOT_COUNTED).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.grad_clip)
            before = self.manager.current_step()  # after a healing it is the peer's
            self.optimizer.step()
            step = self.manager.current_step()
            self.say(
                step=before + 1,
                made=step > before,
                of=self.manager.num_participants(),
                counts=self.manager.is_participating(),
                loss=loss.item(),
            )
            if keeps_data:
                self.keep_position()
            if step >= self.config.steps:
                break

    def keep_position(self) -> None:
        new = self.position.with_suffix(".new")
        torch.save(self.loader.state_dict(), new)
        new.replace(self.position)

    @torch.no_grad()
    def evaluate(self) -> float:
        """As train/evaluate.py: mean over the counted tokens."""
        losses, counted = 0.0, 0
        for number in range(self.config.eval_sequences):
            row = self.data.source.rows([number], held_out=True)
            losses += float(self.model.module(row.tokens, targets=row.targets))
            counted += int((row.targets != datasets.NOT_COUNTED).sum())
        return losses / counted

    def await_all(self) -> None:
        """The run begins with all groups, whichever starts first; a group that comes back waits for none."""
        end = time.monotonic() + ALL_HERE_S
        while not all((self.folder / f"group-{group}.jsonl").exists() for group in range(GROUPS)):
            if time.monotonic() > end:
                raise SystemExit("the other group did not start")
            time.sleep(0.02)

    def say(self, **what: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps({"at": time.time(), "pid": os.getpid(), **what}) + "\n")


def main() -> None:
    group = Group(Path(sys.argv[1]), int(os.environ["REPLICA_GROUP_ID"]))
    group.say(start=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    group.await_all()
    group.train(keeps_data=os.environ.get("KEEP_DATA", "1") == "1")
    if group.number == 0:
        group.say(held_out=group.evaluate())
    group.manager.shutdown()


if __name__ == "__main__":
    main()

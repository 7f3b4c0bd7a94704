"""What a save takes of a run is looked up once, and again as soon as it is not the same any more."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from trainmaster.train.checkpoint import contents
from trainmaster.train.checkpoint.contents import Contents


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        assert dist.group.WORLD is not None
        self.contents = Contents(self.model, self.optimizer, group=dist.group.WORLD, files=1)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(2, 3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and other things by their names, as a checkpoint of now would have them."""
        layout, tensors, things = self.contents.read()
        names = [f"{index.fqn}" for index in layout._indices]
        loaded = [torch.load(io.BytesIO(thing), weights_only=True) for thing in things]
        paths = [".".join(map(str, path)) for path in layout.paths]
        return dict(zip(names, tensors, strict=True)), dict(zip(paths, loaded, strict=True))

    def truth(self) -> dict[str, Tensor]:
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, weight in self.model.named_parameters():
            for kind, value in self.optimizer.state[weight].items():
                found[f"optimizer.state.{name}.{kind}"] = value
        return found


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        seen.append(1)
        return get_state_dict(model, optimizer)

    monkeypatch.setattr(contents, "get_state_dict", look)
    return seen


def must_be_equal(tensors: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert tensors.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.equal(tensors[name], value), name


def test_later_saves_see_the_values_of_now_without_a_look_up(lookups: list[int]) -> None:
    run = Run()
    run.read()
    for lr in (0.2, 0.3):
        run.step()
        run.optimizer.param_groups[0]["lr"] = lr
        tensors, things = run.read()
        must_be_equal(tensors, run.truth())
        assert things["optimizer.param_groups.0.lr"] == lr
        assert things["optimizer.param_groups.0.params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(lookups) == 1


def test_what_was_replaced_is_looked_up(lookups: list[int]) -> None:
    run = Run()
    run.read()
    run.optimizer.state.clear()  # a rollback to the start
    run.step()
    must_be_equal(run.read()[0], run.truth())
    run.model[1].running_mean = torch.full((4,), 7.0)
    must_be_equal(run.read()[0], run.truth())
    run.model[0].weight.data = torch.full((4, 3), 5.0)
    must_be_equal(run.read()[0], run.truth())
    assert len(lookups) == 4


def test_what_was_forgotten_keeps_no_memory() -> None:
    run = Run()
    run.read()
    held = weakref.ref(next(iter(run.optimizer.state.values()))["exp_avg"])
    run.contents.forget()
    run.optimizer.state.clear()
    assert held() is None

"""Acceptance runs on real data sets: every format trains, ranks share the data, faults are named."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "datasets"))

import image_files

from trainmaster.bench.accept import rank
from trainmaster.bench.accept.feed import Feed, check_shared_memory
from trainmaster.bench.accept.options import Options
from trainmaster.core.errors import DataError
from trainmaster.datasets.images import open_images
from trainmaster.train.parallel.rank_info import RankInfo

CPU = torch.device("cpu")
OPTIONS = Options(
    model="resnet18", num_classes=100, batch_size=4, warmup_iterations=1, active_iterations=3, learning_rate=0.01
)


def info(number: int = 0, world: int = 1) -> RankInfo:
    return RankInfo(
        rank=number, world_size=world, local_rank=number, local_world_size=world, node_rank=0, nodes=1, master=None
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    image_files.fashion_mnist(folder)
    for classes in (10, 100):
        image_files.cifar(folder, classes=classes)
    image_files.imagenet(folder)
    return folder


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fashion_mnist", "imagenet"])
def test_a_model_trains_on_files(data: Path, mode: str) -> None:
    changes = {"data_mode": mode, "data_dir": str(data), "workers": 0}
    options = dataclasses.replace(OPTIONS, **changes, image_size=32 if mode == "imagenet" else None)
    (found,) = rank.run(options, info(), show=lambda _: None)
    assert len(found.losses) == 3
    assert len(set(found.losses)) == 3  # each step had a batch of its own
    assert found.waited_s is not None


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize("mode", ["cifar10", "cifar100"])
def test_batches_of_other_sets_fit_the_model_too(data: Path, mode: str) -> None:
    options = dataclasses.replace(OPTIONS, data_mode=mode)
    batch = Feed(open_images(mode, data), options, CPU, info()).next()
    assert batch.inputs.shape == (4, options.channels, options.pixels, options.pixels)


def test_ranks_share_each_epoch_without_a_sample_twice(data: Path) -> None:
    images = open_images("fashion_mnist", data)
    options = dataclasses.replace(OPTIONS, data_mode="fashion_mnist")
    feeds = [Feed(images, options, CPU, info(number, 2)) for number in range(2)]
    epochs = [[feed.next().inputs.flatten(1) for feed in feeds for _ in range(5)] for _ in range(2)]
    for epoch in epochs:
        rows = torch.cat(epoch)
        assert len({tuple(row[:50].tolist()) for row in rows}) == 40
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))  # another order


def test_images_are_scaled_to_the_size_asked_for(data: Path) -> None:
    options = dataclasses.replace(OPTIONS, data_mode="cifar10", image_size=48)
    batch = Feed(open_images("cifar10", data), options, CPU, info()).next()
    assert batch.inputs.shape == (4, 3, 48, 48)
    assert abs(float(batch.inputs.mean())) < 1  # normalised


@pytest.mark.spawns
def test_workers_read_the_same_batches_and_pass_faults_on(data: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, data_mode="imagenet", image_size=32)
    images = open_images("imagenet", data, image_size=32)
    own, others = (Feed(images, dataclasses.replace(options, workers=count), CPU, info()) for count in (0, 2))
    for _ in range(3):
        assert torch.equal(own.next().inputs, others.next().inputs)
    broken = tmp_path / "imagenet" / "train" / "n1"
    broken.mkdir(parents=True)
    for number in range(4):
        (broken / f"{number}.JPEG").write_bytes(b"\xff\xd8\xff")
    feed = Feed(open_images("imagenet", tmp_path), dataclasses.replace(options, workers=1), CPU, info())
    with pytest.raises(DataError, match=r"^\S*n1/\d\.JPEG: truncated"):
        feed.next()


def test_too_little_shared_memory_is_refused_before_a_worker_dies(data: Path, tmp_path: Path) -> None:
    images = open_images("cifar10", data)
    huge = dataclasses.replace(OPTIONS, batch_size=10**12)
    with pytest.raises(DataError, match=r"--ipc=host or --shm-size.*--workers 0"):
        check_shared_memory(images, huge, 8, place=tmp_path)
    check_shared_memory(images, huge, 0, place=tmp_path)
    check_shared_memory(images, OPTIONS, 8, place=tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"), [({"batch_size": 41}, "--batch-size"), ({"num_classes": 9}, "--num-classes 9")]
)
def test_options_that_do_not_fit_the_data_are_named(data: Path, changes: dict[str, int], named: str) -> None:
    options = dataclasses.replace(OPTIONS, data_mode="cifar10", **changes)
    with pytest.raises(DataError, match=named):
        Feed(open_images("cifar10", data), options, CPU, info())

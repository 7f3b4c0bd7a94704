"""Lightning whose resume is proven: trainmaster drill --out proof/ -- python3 train.py

Lightning restores weights, optimizer and schedule. It does not restore random states nor the place in the data, saves
no digest, and starts at step 0 unless `fit` is given a checkpoint: all of that stands here, in `Resume`, `Sealed` and
`find_whole`.
"""

import hashlib
import os
import random
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, Sampler, TensorDataset

FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))
STEPS, EVERY, MICRO, BATCH = int(os.environ.get("STEPS", "40")), 5, 2, 4
SEED = int(os.environ.get("SEED", "7"))
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
        )
        self.total = 0.0

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.total += loss.item() / MICRO
        return loss

    def on_before_optimizer_step(self, _):
        if RANK == 0:
            print(f"step {self.global_step + 1} loss {self.total!r}", flush=True)
        self.total = 0.0

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / 200))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


class Shuffle(Sampler):
    """Endless, and able to begin anywhere: the order depends on the seed and on the place alone."""

    def __init__(self, size):
        self.size, self.start = size, 0

    def __iter__(self):
        at = self.start * WORLD + RANK
        while True:
            epoch, place = divmod(at, self.size)
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(SEED + epoch))
            for index in order[place::WORLD].tolist():
                at += WORLD
                yield index


class Resume(lightning.Callback):
    """What Lightning leaves out: random states of every rank, and the place in the data."""

    def __init__(self, sampler):
        self.sampler, self.done, self.saved = sampler, 0, None

    def on_train_batch_end(self, *_):
        self.done += 1

    def on_save_checkpoint(self, trainer, module, checkpoint):
        states = [(torch.get_rng_state(), random.getstate())] * WORLD
        if WORLD > 1:
            torch.distributed.all_gather_object(states, states[0])
        checkpoint["random"], checkpoint["batches"] = states, self.done

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.done, self.saved = checkpoint["batches"], checkpoint["random"][RANK]
        self.sampler.start = self.done * BATCH

    def on_train_batch_start(self, *_):
        if self.saved is not None:  # after the loader was made, which draws a number too
            torch.set_rng_state(self.saved[0])
            random.setstate(self.saved[1])
            self.saved = None


class Sealed(TorchCheckpointIO):
    """Keeps a digest beside each checkpoint, written last."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        with Path(path).open("rb") as file:
            os.fsync(file.fileno())  # on the disk before anything says so
        with seal(path).open("w") as file:
            file.write(digest(path))
            file.flush()
            os.fsync(file.fileno())

    def remove_checkpoint(self, path):
        seal(path).unlink(missing_ok=True)
        super().remove_checkpoint(path)


def seal(path):
    return Path(f"{path}.sha256")


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def find_whole():
    """The newest checkpoint that is whole. Where some were finished and none is whole, nothing starts."""
    for path in sorted(FOLDER.glob("step=*.ckpt"), reverse=True):
        if seal(path).exists() and seal(path).read_text() == digest(path):
            return path
        print(f"{path.name} is not whole: passed over", flush=True)
    if any(FOLDER.glob("*.sha256")):
        raise SystemExit("checkpoints are there and none is whole")
    return None


def main():
    torch.set_num_threads(1)
    lightning.seed_everything(SEED, verbose=False)
    numbers = torch.Generator().manual_seed(SEED)
    data = TensorDataset(torch.randn(96, 8, generator=numbers), torch.randn(96, 1, generator=numbers))
    sampler = Shuffle(len(data))
    saves = ModelCheckpoint(FOLDER, "{step:05d}", every_n_train_steps=EVERY, monitor="step", mode="max", save_top_k=3)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=MICRO,
        accelerator="auto",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        callbacks=[Resume(sampler), saves],
        plugins=[Sealed()],
        use_distributed_sampler=False,  # the sampler knows its rank
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    trainer.fit(Model(), loader, ckpt_path=find_whole(), weights_only=False)


if __name__ == "__main__":
    main()

"""Plain PyTorch whose resume is proven: trainmaster drill --out proof/ -- torchrun --nproc-per-node 2 train.py

Everything that the next step depends on is in a checkpoint: weights, optimizer, schedule, random states, the place in
the data. It is written aside, renamed, and named in `latest` last. A digest tells a damaged one: an older one is taken.
"""

import hashlib
import io
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY, MICRO = int(os.environ.get("STEPS", "40")), 5, 2  # MICRO: micro-batches of a step
SEED = int(os.environ.get("SEED", "7"))
FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make_loader():
    numbers = torch.Generator().manual_seed(SEED)
    data = TensorDataset(torch.randn(96, 8, generator=numbers), torch.randn(96, 1, generator=numbers))
    order = torch.Generator().manual_seed(SEED + RANK)
    return DataLoader(data, batch_size=4, shuffle=True, generator=order), order


def save(step, content):
    name, raw = f"step-{step:04d}.rank{RANK}.pt", io.BytesIO()
    torch.save(content, raw)
    part = FOLDER / f"{name}.tmp"
    torch.save({"content": raw.getvalue(), "digest": hashlib.sha256(raw.getvalue()).hexdigest()}, part)
    put(part, FOLDER / name)
    if WORLD > 1:
        dist.barrier()  # every rank's file is there before anything says so
    if RANK == 0:
        (FOLDER / "latest.tmp").write_text(f"{step}")
        put(FOLDER / "latest.tmp", FOLDER / "latest")
    for old in sorted(FOLDER.glob(f"step-*.rank{RANK}.pt"))[:-3]:
        old.unlink()


def put(part, path):
    """Give a file its name when it is on the disk, and the name too."""
    for place, rename in ((part, True), (path.parent, False)):
        handle = os.open(place, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        if rename:
            part.rename(path)


def load():
    """The newest checkpoint that every rank can read; None: nothing was saved."""
    steps = sorted((int(path.name[5:9]) for path in FOLDER.glob(f"step-*.rank{RANK}.pt")), reverse=True)
    saved = [(step, content) for step in steps if (content := read(step)) is not None]
    whole = share({step for step, _ in saved})
    if not whole and (FOLDER / "latest").exists():
        raise SystemExit("checkpoints are there and none is whole on every rank")
    return dict(saved)[max(whole)] if whole else None


def share(steps):
    """Steps that every rank can go on from."""
    everyone = [steps] * WORLD
    if WORLD > 1:
        dist.all_gather_object(everyone, steps)
    return set.intersection(*everyone)


def read(step):
    path = FOLDER / f"step-{step:04d}.rank{RANK}.pt"
    try:
        outer = torch.load(path, weights_only=False)
        if hashlib.sha256(outer["content"]).hexdigest() == outer["digest"]:
            return torch.load(io.BytesIO(outer["content"]), weights_only=False)
    except Exception as error:
        print(f"{path.name}: {type(error).__name__}", flush=True)
    print(f"{path.name} is not whole: passed over", flush=True)
    return None


def main():
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if WORLD > 1:
        dist.init_process_group("gloo")
    random.seed(SEED)
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / 200))
    loader, order = make_loader()
    step, place, began = 0, 0, order.get_state()  # place: micro-batches of this epoch that are done
    saved = load()
    if saved is not None:
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        place, began = saved["place"], saved["began"]
    order.set_state(began)
    batches = iter(loader)
    for _ in range(place):
        next(batches)
    if saved is not None:
        torch.set_rng_state(saved["torch"])
        random.setstate(saved["python"])
    micro, total = 0, 0.0
    while step < STEPS:
        try:
            x, y = next(batches)
        except StopIteration:
            began, place = order.get_state(), 0
            batches = iter(loader)
            continue
        place += 1
        loss = torch.nn.functional.mse_loss(model(x), y) / MICRO
        loss.backward()
        micro, total = micro + 1, total + loss.item()
        if micro == MICRO:
            if WORLD > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if RANK == 0:
                print(f"step {step} loss {total!r}", flush=True)
            micro, total = 0, 0.0
        if micro == 0 and step % EVERY == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            numbers = {"torch": torch.get_rng_state(), "python": random.getstate()}
            save(step, {"step": step, "place": place, "began": began, **state, **numbers})
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A stranger's training script, whole or with one bug of its resume (BUG=…). It knows nothing of Trainmaster.

On a CPU, deterministic: dropout, AdamW, a learning rate schedule, a shuffled DataLoader, two micro-batches a step, and
checkpoints that are written aside, checked by a digest, renamed, and named in `latest` last.
"""

import hashlib
import io
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY, MICRO, SEED = int(os.environ.get("STEPS", "40")), 5, 2, 7
BUG = os.environ.get("BUG", "")
FOLDER = Path(os.environ.get("CHECKPOINTS") or os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make_loader() -> tuple[DataLoader, torch.Generator]:
    numbers = torch.Generator().manual_seed(SEED)
    data = TensorDataset(torch.randn(96, 8, generator=numbers), torch.randn(96, 1, generator=numbers))
    order = torch.Generator().manual_seed(SEED + RANK)
    return DataLoader(data, batch_size=4, shuffle=True, generator=order), order


def save(step: int, content: dict) -> None:
    name, raw = f"step-{step:04d}.rank{RANK}.pt", io.BytesIO()
    torch.save(content, raw)
    digest = hashlib.sha256(raw.getvalue()).hexdigest()
    if BUG == "latest" and RANK == 0:
        (FOLDER / "latest").write_text(f"{step}")
    place = FOLDER / (name if BUG == "latest" else f"{name}.tmp")
    torch.save({"content": raw.getvalue(), "digest": digest}, place)
    place.rename(FOLDER / name)
    if RANK == 0:
        (FOLDER / "latest.tmp").write_text(f"{step}")
        (FOLDER / "latest.tmp").rename(FOLDER / "latest")
    for old in sorted(FOLDER.glob(f"step-*.rank{RANK}.pt"))[:-3]:
        old.unlink()


def load() -> dict | None:
    if BUG == "step0" or not (FOLDER / "latest").exists():
        return None
    newest = int((FOLDER / "latest").read_text())
    if BUG == "latest":
        return read(FOLDER / f"step-{newest:04d}.rank{RANK}.pt")
    for path in sorted(FOLDER.glob(f"step-*.rank{RANK}.pt"), reverse=True):
        try:
            return read(path)
        except Exception as error:
            print(f"{path.name} cannot be used: {type(error).__name__}", flush=True)
    raise SystemExit("checkpoints are there and none can be used")


def read(path: Path) -> dict:
    outer = torch.load(path, weights_only=False)
    if hashlib.sha256(outer["content"]).hexdigest() != outer["digest"]:
        raise ValueError("another digest")
    return torch.load(io.BytesIO(outer["content"]), weights_only=False)


def main() -> None:
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
        if not (BUG == "rank0" and RANK > 0):
            model.load_state_dict(saved["model"])
            if BUG != "optimizer":
                optimizer.load_state_dict(saved["optimizer"])
        if BUG != "schedule":
            schedule.load_state_dict(saved["schedule"])
        if BUG != "data":
            place, began = saved["place"], saved["began"]
    order.set_state(began)
    batches = iter(loader)
    for _ in range(place):
        next(batches)
    if saved is not None and BUG != "random":
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
        # The bug: a checkpoint in the middle of a step, without the gradients that are there already.
        at = place % 11 == 5 if BUG == "accumulation" else micro == 0 and step % EVERY == 0
        if at:
            save(
                step,
                {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "place": place,
                    "began": began,
                    "torch": torch.get_rng_state(),
                    "python": random.getstate(),
                },
            )
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

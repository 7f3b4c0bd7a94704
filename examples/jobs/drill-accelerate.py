"""Accelerate whose resume is proven: trainmaster drill --out proof/ -- accelerate launch train.py

`save_state` keeps weights, optimizer, schedule and random states; the place in the data is `skip_first_batches`, which
is counted here. A checkpoint gets its name when it is whole, and its digests tell a damaged one.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))
STEPS, EVERY, SEED = int(os.environ.get("STEPS", "40")), 5, int(os.environ.get("SEED", "7"))
SEAL = "digests.json"


def save(accelerator, step, epoch, place):
    part = FOLDER / "part"
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (part / "place.json").write_text(json.dumps({"step": step, "epoch": epoch, "place": place}))
        for path in part.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # on the disk before anything says so
        with (part / SEAL).open("w") as file:
            file.write(json.dumps(digest(part)))
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(FOLDER / f"step-{step:05d}", ignore_errors=True)  # one that was not whole
        part.rename(FOLDER / f"step-{step:05d}")
        for old in sorted(FOLDER.glob("step-*"))[:-3]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def digest(folder):
    files = sorted(path for path in folder.iterdir() if path.name != SEAL)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def find_whole():
    found = sorted(FOLDER.glob("step-*"), reverse=True)
    for folder in found:
        if (folder / SEAL).exists() and json.loads((folder / SEAL).read_text()) == digest(folder):
            return folder
        print(f"{folder.name} is not whole: passed over", flush=True)
    if found:
        raise SystemExit("checkpoints are there and none is whole")
    return None


def main():
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(SEED)
    numbers = torch.Generator().manual_seed(SEED)
    data = TensorDataset(torch.randn(96, 8, generator=numbers), torch.randn(96, 1, generator=numbers))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Accelerate advances the schedule once for each process and step.
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (200 * accelerator.num_processes))
    order = torch.Generator()
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
    model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    step, epoch, place = 0, 0, 0  # place: batches of this epoch that are done
    saved = find_whole()
    if saved is not None:
        at = json.loads((saved / "place.json").read_text())
        step, epoch, place = at["step"], at["epoch"], at["place"]
    restored = saved is None
    while step < STEPS:
        order.manual_seed(SEED + epoch)  # the order of an epoch depends on its number alone
        for x, y in skip_first_batches(loader, place) if place else loader:
            if not restored:  # after the first batch was read: making the loader draws random numbers
                accelerator.load_state(str(saved))
                restored = True
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                rate.step()
                optimizer.zero_grad()
            place += 1
            if accelerator.sync_gradients:
                step += 1
                if accelerator.is_main_process:
                    print(f"step {step} loss {loss.item()!r}", flush=True)
                if step % EVERY == 0:
                    save(accelerator, step, epoch, place)
                if step == STEPS:
                    break
        epoch, place = epoch + 1, 0
    accelerator.end_training()


if __name__ == "__main__":
    main()

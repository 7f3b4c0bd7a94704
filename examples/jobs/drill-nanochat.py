"""One file in the manner of nanochat whose resume is proven: trainmaster drill --out proof/ -- python3 train.py

Tokens come from a stream without a DataLoader: the place in it is one number. A checkpoint is three files of one step
(`model_000010.pt`, `optim_000010.pt`, `meta_000010.json`); the last, with the digests of the others, makes it whole.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch.nn import functional

FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))
STEPS, EVERY, SEED = int(os.environ.get("STEPS", "40")), 5, int(os.environ.get("SEED", "7"))
BATCH, LENGTH, VOCABULARY, WIDTH = 4, 16, 64, 32


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


def read_batch(tokens, at):
    some = tokens[at : at + BATCH * LENGTH + 1]
    return some[:-1].view(BATCH, LENGTH), some[1:].view(BATCH, LENGTH)


def save(step, at, model, optimizer):
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = {f"model_{step:06d}.pt": model.state_dict(), f"optim_{step:06d}.pt": optimizer.state_dict()}
    for name, content in names.items():
        with (FOLDER / name).open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before anything says so
    meta = {"step": step, "at": at, "digests": {name: digest(FOLDER / name) for name in names}}
    with (FOLDER / "meta.tmp").open("w") as file:
        file.write(json.dumps(meta))
        file.flush()
        os.fsync(file.fileno())
    (FOLDER / "meta.tmp").rename(FOLDER / f"meta_{step:06d}.json")
    for old in sorted(FOLDER.glob("meta_*.json"))[:-3]:
        for path in FOLDER.glob(f"*{old.stem[4:]}.*"):
            path.unlink()


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"


def find_whole():
    """The newest checkpoint that is whole. Where some were finished and none is whole, nothing starts."""
    found = sorted(FOLDER.glob("meta_*.json"), reverse=True)
    for path in found:
        meta = json.loads(path.read_text())
        if all(digest(FOLDER / name) == wanted for name, wanted in meta["digests"].items()):
            return meta
        print(f"step {meta['step']} was saved and is not whole: passed over", flush=True)
    if found:
        raise SystemExit("checkpoints are there and none is whole")
    return None


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (20_000,), generator=torch.Generator().manual_seed(SEED))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step, at = 0, 0
    meta = find_whole()
    if meta is not None:
        step, at = meta["step"], meta["at"]
        model.load_state_dict(torch.load(FOLDER / f"model_{step:06d}.pt"))
        optimizer.load_state_dict(torch.load(FOLDER / f"optim_{step:06d}.pt"))
    while step < STEPS:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / (2 * STEPS))  # of the step alone: there is no schedule to save
        loss = model(*read_batch(tokens, at))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, at = step + 1, (at + BATCH * LENGTH) % 19_000
        print(f"step {step:05d}/{STEPS:05d} | loss: {loss.item():.6f}", flush=True)
        if step % EVERY == 0:
            save(step, at, model, optimizer)


if __name__ == "__main__":
    main()

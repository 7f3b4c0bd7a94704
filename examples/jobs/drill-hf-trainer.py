"""Hugging Face Trainer whose resume is proven: trainmaster drill --out proof/ -- python3 train.py

The Trainer restores weights, optimizer, schedule, random state and the place in the data by itself, if you leave
`save_only_model` and `ignore_data_skip` off. What it does not do stands here: it starts at step 0 unless it is told to
resume; it takes the newest folder although a kill left it unfinished; and it does not notice a damaged file.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import Trainer, TrainerCallback, TrainingArguments

FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))
STEPS, EVERY, SEED = int(os.environ.get("STEPS", "40")), 5, int(os.environ.get("SEED", "7"))
SEAL = "digests.json"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
        )

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}


def make_data():
    numbers = torch.Generator().manual_seed(SEED)
    return [{"x": torch.randn(8, generator=numbers), "labels": torch.randn(1, generator=numbers)} for _ in range(96)]


class Seal(TrainerCallback):
    """Writes the digest of every file of a checkpoint, last: without it, or with another one, it is not whole."""

    def on_save(self, args, state, control, **_):
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            folder = FOLDER / f"checkpoint-{state.global_step}"
            for path in folder.rglob("*"):
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # on the disk before anything says so
            with (folder / "part").open("w") as file:
                file.write(json.dumps(digest(folder)))
                file.flush()
                os.fsync(file.fileno())
            (folder / "part").replace(folder / SEAL)


def digest(folder):
    files = sorted(path for path in folder.iterdir() if path.name not in (SEAL, "part"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def find_whole():
    """The newest checkpoint that is whole. Where some were finished and none is whole, nothing starts."""
    found = sorted(FOLDER.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True)
    for folder in found:
        if (folder / SEAL).exists() and json.loads((folder / SEAL).read_text()) == digest(folder):
            return str(folder)
        print(f"{folder.name} is not whole: passed over", flush=True)
    if any((folder / SEAL).exists() for folder in found):
        raise SystemExit("checkpoints are there and none is whole")
    return None


def main():
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(FOLDER),
        max_steps=STEPS,
        save_steps=EVERY,
        save_total_limit=3,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=4,
        seed=SEED,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(SEED)
    trainer = Trainer(model=Model(), args=arguments, train_dataset=make_data(), callbacks=[Seal()])
    trainer.train(resume_from_checkpoint=find_whole())


if __name__ == "__main__":
    main()

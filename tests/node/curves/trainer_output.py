"""Standard output and files of Hugging Face's Trainer, character by character as transformers 5.22 and tqdm leave them.

tqdm draws a bar again when 0.1 s have passed. `tqdm.write`, with which the Trainer prints its dicts, wipes all bars,
prints, and draws them again. A bar below the first one is drawn after a newline, and followed by the code for "up".
"""

from __future__ import annotations

from dataclasses import dataclass, field

UP = "\x1b[A"
STEPS, LOG_EVERY, EVAL_EVERY, BATCHES = 60, 5, 20, 32


@dataclass(kw_only=True)
class Recording:
    """What one call of `train()` prints, from `start`. `drawn_every`: 1 is a slow run, 7 a fast one."""

    drawn_every: int
    start: int = 0
    text: str = ""
    rows: list[dict[str, float]] = field(default_factory=list)  # `log_history`

    def train(self, until: int = STEPS) -> str:
        self._draw(0, STEPS)
        for step in range(self.start + 1, until + 1):
            if step % self.drawn_every == 0:
                self._draw(step, STEPS)
            if step % LOG_EVERY == 0:
                self._write({"loss": loss_at(step), "grad_norm": 0.5, "learning_rate": 1e-5, "epoch": step / 32}, step)
            if step % EVAL_EVERY == 0:
                self._evaluate(step)
                self._shards()
        if until == STEPS:
            self._write({"train_runtime": 84.4, "train_loss": 9.9, "epoch": 1.9}, STEPS)
            self._draw(STEPS, STEPS)
        return self.text

    def _evaluate(self, step: int) -> None:
        for batch in range(0, BATCHES, self.drawn_every):
            self._draw(batch, BATCHES, below=True)
        self._write({"eval_loss": loss_at(step) + 1, "eval_runtime": 16.0, "epoch": step / 32}, step, below=True)
        self._draw(BATCHES, BATCHES, below=True)
        self.text += f"\n\r{' ' * 47}{UP}"

    def _shards(self) -> None:
        self._draw(0, 1, below=True, title="Writing model shards: ")
        self._draw(1, 1, title="Writing model shards: ")
        self.text += "\n"

    def _write(self, row: dict[str, float], step: int, *, below: bool = False) -> None:
        self.rows.append({**row, "step": step})
        printed = {name: f"{value:.4g}" for name, value in row.items()}
        self.text += f"\r{' ' * 47}\r" + (f"\n\r{' ' * 47}\r{UP}" if below else "") + f"{printed}\n"
        self._draw(step, STEPS)

    def _draw(self, at: int, whole: int, *, below: bool = False, title: str = "") -> None:
        filled = "█" * (10 * at // whole)
        bar = f"\r{title}{100 * at // whole:3}%|{filled:10}| {at}/{whole} [00:04<00:39,  1.41it/s]"
        self.text += f"\n{bar}{UP}" if below else bar


def loss_at(step: int) -> float:
    """Of a training step."""
    return 4 - step / 100

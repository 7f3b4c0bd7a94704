"""A small script in many versions that print more than losses: some lose what they print, the others resume right.

Each keeps something beside weights and optimizer, and prints it: at its end, in the line of a step, or of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_PROGRAM = """\
import logging, os, sys, time
from pathlib import Path

import torch

FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))
STEPS, EVERY, EPOCH = 40, 5, 12
torch.set_num_threads(1)
torch.manual_seed(0)
FOLDER.mkdir(exist_ok=True)
x = torch.randn(EPOCH * 4, 8)
y = x.sum(1, keepdim=True).tanh() + 0.3 * torch.randn(EPOCH * 4, 1)
noise = torch.randn(32, 8), torch.randn(32, 1)  # nothing to be learned: the loss on it is best at the beginning
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)


def evaluate(x=x, y=y):
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x), y).item()


step, kept, began = 0, {BEGIN}, time.time()
for path in sorted(FOLDER.glob("step-*.pt"))[-1:]:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    LOAD
print(f"parameters 161, loss before training {evaluate():.5f}, starting at step {step}", flush=True)
first = step
while step < STEPS:
    at = step % EPOCH
    if at == 0:
        NEW
        pass
    rows = slice(at * 4, at * 4 + 4)
    loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    STEP
    if at == EPOCH - 1:
        AFTER
        pass
    if step % EVERY == 0:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, SAVE}
        torch.save(content, FOLDER / "part")
        (FOLDER / "part").rename(FOLDER / f"step-{step:04d}.pt")
END
"""
_LINE = 'print(f"step {step}/{STEPS} loss {loss.item():.5f}", flush=True)'
_KEEP = {"load": 'kept = saved["kept"]', "save": '"kept": kept'}
_EMA = {
    "begin": "[one.detach().clone() for one in model.parameters()]",
    "step": "[k.lerp_(one.detach(), 0.05) for k, one in zip(kept, model.parameters())]",
    "end": (
        "for k, one in zip(kept, model.parameters()):\n"
        "    one.data.copy_(k)\n"
        'print(f"final ema loss {evaluate():.5f}", flush=True)'
    ),
}
_BEST = {
    "begin": '{"best": 9.0, "at": 0}',
    "step": "kept = min([kept, {'best': evaluate(*noise), 'at': step}], key=lambda one: one['best'])",
    "end": "print(f\"best val {kept['best']:.4f} at step {kept['at']}; last {evaluate(*noise):.4f}\")",
}
_MEAN = {
    "begin": "[]",
    "new": "kept = []",
    "step": "kept.append(loss.item())",
    "after": 'print(f"epoch {step // EPOCH} train loss {sum(kept) / len(kept):.4f} val {evaluate():.4f}")',
}
_SMOOTH = {
    "begin": "[0.0]",
    "step": "kept[0] = 0.98 * kept[0] + 0.02 * loss.item()",
    "line": 'print(f"step {step} | loss {loss.item():.4f} | debiased {kept[0] / (1 - 0.98**step):.4f}", flush=True)',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    begin: str = "None"
    load: str = "pass"
    new: str = ""
    step: str = ""
    line: str = _LINE
    after: str = ""
    save: str = ""
    end: str = ""

    def __str__(self) -> str:
        program = _PROGRAM.replace("{BEGIN}", self.begin).replace("LOAD\n", f"{self.load}\n")
        program = program.replace("        NEW\n", f"        {self.new}\n" if self.new else "")
        program = program.replace(
            "    STEP\n", f"    {self.step}\n    {self.line}\n" if self.step else f"    {self.line}\n"
        )
        program = program.replace("        AFTER\n", f"        {self.after}\n" if self.after else "")
        return program.replace("SAVE}", f"{self.save}}}").replace("END\n", f"{self.end}\n")


LOST: Mapping[str, Version] = {
    "ema": Version(**_EMA),
    "best": Version(**_BEST),
    "epoch mean": Version(**_MEAN),
    "smoothed": Version(**_SMOOTH),
    "tokens": Version(begin="0", step="kept += 32", end='print(f"done after {kept} tokens")'),
}
WHOLE: Mapping[str, Version] = {
    "ema": Version(**_EMA, **_KEEP),
    "best": Version(**_BEST, **_KEEP),
    "epoch mean": Version(**_MEAN, **_KEEP),
    "times": Version(
        line=(
            'logging.warning(time.strftime("%Y-%m-%d %H:%M:%S") + f" [{os.getpid()}] step {step} '
            "loss {loss.item():.5f} dt {time.time() - began:.0f}s {4 / (time.time() - began):.1f} samples/s "
            'mem {40 + first} MiB")'
        ),
        end=(
            'print(f"final loss {evaluate():.5f}, took {time.time() - began:.1f} s, {4 * step / 1e3:.3f}k samples, '
            'checkpoints in {FOLDER}, pid {os.getpid()}")'
        ),
    ),
    "bar": Version(
        begin='__import__("tqdm").tqdm(total=STEPS)',
        load="kept.update(step)",
        step='kept.set_postfix(loss=f"{loss.item():.4f}", ppl=f"{loss.exp().item():.4f}")\n    kept.update(1)',
        line='print(f"\\rstep {step} of {STEPS}", end="", flush=True)',
        end='kept.close()\nprint(f"\\nfinal loss {evaluate():.5f}")',
    ),
    "of this process": Version(
        end='print(f"steps in this process: {step - first}; final loss {evaluate():.5f}; trained from step {first}")'
    ),
    "restarts": Version(
        begin="[0]",
        load='kept = saved["kept"]\n    kept[0] += 1\n    print(f"resumed from step {step}, restart {kept[0]}")',
        save='"kept": kept',
        end='print(f"{kept[0]} restarts, final loss {evaluate():.5f}")',
    ),
    "eval": Version(
        after='print(f"held-out loss {evaluate():.5f}", flush=True)', end='print(f"held-out loss {evaluate():.5f}")'
    ),
}
COUNTED: Mapping[str, Version] = {
    "steps": Version(end='print(f"trained {step - first} steps, final loss {evaluate():.5f}")'),
    "average": Version(
        begin="[]", step="kept.append(loss.item())", end='print(f"mean loss {sum(kept) / len(kept):.4f}")'
    ),
}

"""The recipes that ship, whole or with one planted bug: texts of the recipe are replaced by others.

The bugs are those of issue reports: a part of the state that is not restored, a checkpoint that is named too early, one
that is loaded on rank 0 only or taken in the middle of a step.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from fork_server import ForkServer
from trainmaster.core.spec import JobSpec, Limits, Resources
from trainmaster.drill.record import Proof, References, Setup
from trainmaster.drill.run import CommandDrill
from warm_python import WarmPython

RECIPES = Path(__file__).parents[2] / "examples" / "jobs"
NEEDS = {
    "torchrun": ("torch",),
    "nanochat": ("torch",),
    "accelerate": ("accelerate",),
    "hf-trainer": ("transformers", "accelerate"),
    "lightning": ("lightning",),
}
# What a fork server imports before it runs one.
IMPORTS = {
    "torchrun": ("torch", "torch._dynamo", "torch.utils.data"),
    "nanochat": ("torch", "torch._dynamo"),
    "accelerate": ("torch", "torch._dynamo", "accelerate"),
    "hf-trainer": ("torch._dynamo", "transformers.trainer", "transformers.integrations.integration_utils"),
    "lightning": ("torch._dynamo", "lightning", "lightning.pytorch.callbacks", "lightning.pytorch.strategies"),
}
# What fails first, and words of its finding. Losses fail with it, and say from what it follows.
CLAIMS = {
    "optimizer": ("optimizer", "is empty"),
    "data": ("data", "read other data in step"),
    "schedule": ("schedule", "the schedule began anew"),
    "random": ("random", "the random state of torch"),
    "latest": ("restart", "after SIGKILL during a save the program did not start again"),
    "step0": ("start", "began at step 0, although step"),
    "rank0": ("ranks", "rank 1"),
    "accumulation": ("accumulation", "micro-batches of 2"),
}

_BROKEN = "class Broken(Trainer):\n    {}\n\n\ndef main():\n"
_HF_TRAIN = "trainer.train(resume_from_checkpoint=find_whole())"
_HF_LOAD = "def _load_optimizer_and_scheduler(self, checkpoint):\n        if checkpoint is not None:\n            "
_LAST = "trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER) if FOLDER.exists() else None)"
_SKIP = (
    "import transformers.trainer\n\nskip = transformers.trainer.skip_first_batches\n"
    "transformers.trainer.skip_first_batches = lambda loader, done=0: skip(loader, {})\n\n\ndef main():\n"
)
_FIT = "ckpt_path=find_whole()"
_ON_LOAD = (
    "def on_load_checkpoint(self, checkpoint):\n        checkpoint[{!r}] = []\n\n    def configure_optimizers(self):"
)
_MIDDLE = (
    "def on_train_batch_end(self, trainer, *_):\n        self.done += 1\n        if self.done % 12 == 5:\n"
    '            trainer.save_checkpoint(FOLDER / f"step={trainer.global_step:05d}.ckpt")\n'
)
Texts = tuple[tuple[str, str], ...]


def _broken_trainer(body: str) -> Texts:
    return (("def main():\n", _BROKEN.format(body)), ("trainer = Trainer(", "trainer = Broken("))


PLANTS: dict[str, dict[str, Texts]] = {
    "hf-trainer": {
        "optimizer": _broken_trainer(
            _HF_LOAD + 'self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt"))'
        ),
        "schedule": _broken_trainer(
            _HF_LOAD + 'self.optimizer.load_state_dict(torch.load(Path(checkpoint) / "optimizer.pt"))'
        ),
        "random": _broken_trainer("def _load_rng_state(self, checkpoint):\n        pass"),
        "data": (("def main():\n", _SKIP.format("0")),),
        "latest": (
            ("import torch\n", "import torch\nfrom transformers.trainer_utils import get_last_checkpoint\n"),
            (_HF_TRAIN, _LAST),
        ),
        "step0": ((_HF_TRAIN, "trainer.train()"),),
        "rank0": (
            (_HF_TRAIN, _HF_TRAIN.replace("find_whole()", 'find_whole() if os.environ["RANK"] == "0" else None')),
        ),
        "accumulation": (("def main():\n", _SKIP.format("done + 1")),),
    },
    "lightning": {
        "optimizer": (("def configure_optimizers(self):", _ON_LOAD.format("optimizer_states")),),
        "schedule": (("def configure_optimizers(self):", _ON_LOAD.format("lr_schedulers")),),
        "random": (("if self.saved is not None:", "if False:"),),
        "data": (("self.sampler.start = self.done * BATCH", "self.sampler.start = 0"),),
        "latest": (
            ("super().save_checkpoint(checkpoint, path, storage_options)", "torch.save(checkpoint, path)"),
            ("if seal(path).exists() and seal(path).read_text() == digest(path):", "if True:"),
        ),
        "step0": ((_FIT, "ckpt_path=None"),),
        "rank0": ((_FIT, "ckpt_path=find_whole() if RANK == 0 else None"),),
        "accumulation": (
            ("def on_train_batch_end(self, *_):\n        self.done += 1\n", _MIDDLE),
            ("every_n_train_steps=EVERY", "every_n_train_steps=10**6"),
        ),
    },
    "torchrun": {
        "optimizer": (('optimizer.load_state_dict(saved["optimizer"])', "pass"),),
        "schedule": (('schedule.load_state_dict(saved["schedule"])', "pass"),),
        "random": (('torch.set_rng_state(saved["torch"])', "pass"),),
        "data": (('place, began = saved["place"], saved["began"]', "pass"),),
        "latest": (
            (
                'part = FOLDER / f"{name}.tmp"\n',
                '(FOLDER / "latest").write_text(f"{step}")\n    part = FOLDER / name\n',
            ),
            (
                'sorted((int(path.name[5:9]) for path in FOLDER.glob(f"step-*.rank{RANK}.pt")), reverse=True)',
                '[int((FOLDER / "latest").read_text())] if (FOLDER / "latest").exists() else []',
            ),
        ),
        "step0": (("saved = load()", "saved = None"),),
        "rank0": (
            (
                'step = saved["step"]\n        model',
                'step = saved["step"]\n    if saved is not None and RANK == 0:\n        model',
            ),
        ),
        "accumulation": (("if micro == 0 and step % EVERY == 0:", "if place % 12 == 5:"),),
    },
}

_SAVE = 'torch.save({"content": raw.getvalue(), "digest": hashlib.sha256(raw.getvalue()).hexdigest()}, part)\n'
_PUT = "    put(part, FOLDER / name)\n"
# Faults that only a struck disk shows: of plain PyTorch.
DISK: dict[str, Texts] = {
    # `latest` is durable before the data is, and is the only way to it.
    "undurable": ((_PUT, "    part.rename(FOLDER / name)\n"), PLANTS["torchrun"]["latest"][1]),
    "silent": ((f"    {_SAVE}", f"    try:\n        {_SAVE}    except RuntimeError:\n        return\n"),),
    "deleted": ((_SAVE, f"[old.unlink() for old in FOLDER.glob('step-*')]\n    {_SAVE}"),),
}
# Checkpoints of another number of ranks are not found.
OTHER_WORLD: Texts = (
    ('FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints"))\n', ""),
    (
        'int(os.environ.get("WORLD_SIZE", "1"))\n',
        'int(os.environ.get("WORLD_SIZE", "1"))\n'
        'FOLDER = Path(os.environ.get("TRAINMASTER_CHECKPOINTS", "checkpoints")) / f"world{WORLD}"\n',
    ),
)

# It ignores SIGTERM, leaves a daemon, prints 10,000 lines a second and a loss that is not a number.
HOSTILE: Texts = (
    ("import random\n", "import random\nimport signal\nimport subprocess\nimport threading\nimport time\n"),
    (
        "    torch.set_num_threads(1)\n",
        "    torch.set_num_threads(1)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        '    subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True)\n'
        "    threading.Thread(target=flood, daemon=True).start()\n",
    ),
    (
        "def main():\n",
        "def flood():\n    while True:\n        print('noise ' * 12 + '\\n' * 99, flush=True)\n"
        "        time.sleep(0.01)\n\n\n"
        "def main():\n",
    ),
    ('print(f"step {step} loss {total!r}", flush=True)', 'print(f"\\nstep {step} loss nan", flush=True)'),
)

# The same scripts with what each project's own pages tell, and nothing of ours: https://huggingface.co/docs/transformers
# (Trainer, checkpoints), https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html,
# https://huggingface.co/docs/accelerate/usage_guides/checkpoint.
DOCUMENTED: dict[str, tuple[str, Texts]] = {
    "hf-trainer": (
        "`trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))`",
        (*PLANTS["hf-trainer"]["latest"], (", callbacks=[Seal()]", "")),
    ),
    "lightning": (
        '`ModelCheckpoint(save_last=True)`, `trainer.fit(..., ckpt_path="last")`, a shuffled DataLoader',
        (
            (_FIT, 'ckpt_path="last"'),
            ("callbacks=[Resume(sampler), saves]", "callbacks=[saves]"),
            ("save_top_k=3)", "save_top_k=3, save_last=True)"),
            ("        plugins=[Sealed()],\n", ""),
            ("batch_size=BATCH, sampler=sampler)", "batch_size=BATCH, shuffle=True)"),
        ),
    ),
    "accelerate": (
        "`save_state` into a folder for each step, `load_state` of the newest, `skip_first_batches`; the step in a "
        "file of the script's own, place.json",
        (
            ('    part = FOLDER / "part"\n', '    part = FOLDER / f"step-{step:05d}"\n'),
            ('        shutil.rmtree(FOLDER / f"step-{step:05d}", ignore_errors=True)  # one that was not whole\n', ""),
            ('        part.rename(FOLDER / f"step-{step:05d}")\n', ""),
            (
                "        for path in part.iterdir():\n"
                '            with path.open("rb") as file:\n'
                "                os.fsync(file.fileno())  # on the disk before anything says so\n"
                '        with (part / SEAL).open("w") as file:\n'
                "            file.write(json.dumps(digest(part)))\n"
                "            file.flush()\n"
                "            os.fsync(file.fileno())\n",
                "",
            ),
            ("if (folder / SEAL).exists() and json.loads((folder / SEAL).read_text()) == digest(folder):", "if True:"),
            (
                '        step, epoch, place = at["step"], at["epoch"], at["place"]\n    restored = saved is None\n',
                '        step, epoch, place = at["step"], at["epoch"], at["place"]\n'
                "        accelerator.load_state(str(saved))\n    restored = True\n",
            ),
        ),
    ),
}


def missing(name: str) -> list[str]:
    """Packages of a recipe that are not installed."""
    return [package for package in NEEDS[name] if find_spec(package) is None]


@contextlib.contextmanager
def warm_python(name: str) -> Iterator[str]:
    """A Python that has imported the packages of a recipe: a start of the Trainer takes 9 CPU s otherwise."""
    server = ForkServer(*IMPORTS[name])
    warm = WarmPython(server)
    try:
        yield str(warm.path)
    finally:
        warm.close()
        server.close()


def text(name: str, changes: Texts = ()) -> str:
    """The recipe with these changes; each replaces a text that stands there once."""
    program = (RECIPES / f"drill-{name}.py").read_text()
    for old, new in changes:
        assert len(re.findall(re.escape(old), program)) == 1, (name, old)
        program = program.replace(old, new)
    return program


def drill(
    folder: Path,
    name: str,
    *,
    strikes: Sequence[str],
    changes: Texts = (),
    python: Sequence[str] = (sys.executable, "-m"),
    ranks: int = 1,
    seed: int = 0,
    references: References | None = None,
    env: dict[str, str] | None = None,
) -> Proof:
    """Drill a recipe as its user would. `python`: what runs a module; a warm one starts at once."""
    return drill_program(
        folder, text(name, changes), name=name, strikes=strikes, python=python, ranks=ranks, seed=seed,
        references=references, env=env,
    )  # fmt: skip


def drill_program(
    folder: Path,
    program: str,
    *,
    strikes: Sequence[str],
    name: str = "own",
    python: Sequence[str] = (sys.executable, "-m"),
    ranks: int = 1,
    seed: int = 0,
    references: References | None = None,
    env: dict[str, str] | None = None,
) -> Proof:
    """The same, of any text."""
    work = folder / "work"
    work.mkdir(parents=True)
    (work / "train.py").write_text(program)
    spec = JobSpec(
        name=f"drill-{name}",
        command=(*python, "train"),
        resources=Resources(processes_per_node=ranks),
        env={"OMP_NUM_THREADS": "1", **(env or {})},
        limits=Limits(grace_s=10.0),
    )
    setup = Setup(spec=spec, work=work, strikes=tuple(strikes), seed=seed)
    proof = CommandDrill(setup, folder / "drill").run(references)
    assert [path.name for path in work.iterdir()] == ["train.py"], "nothing of the user's is touched"
    return proof

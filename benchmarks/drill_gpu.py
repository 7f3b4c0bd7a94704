"""torchtitan's debug model and our own trainer, drilled by the same command on one GPU: a table with strikes as rows.

    PYTHONPATH=src python3 benchmarks/drill_gpu.py --peers WHEELS --out OUT
    PYTHONPATH=src python3 benchmarks/drill_gpu.py --only ours --device cpu --out OUT --strike one --strike flipped

WHEELS holds torchtitan 0.2.2 and what it imports; a wheel whose package is installed already is left alone. Its wheel
brings neither text nor tokenizer, so both are made here where its debug model looks for them, and `stand_in/datasets`
reads the text in place of Hugging Face's package. All other settings are those of its debug_model.toml, but for a save
every 5 steps and a seed. Ours is not compiled. Both are started as one rank by the agent; --torchrun puts torchrun
between, which takes some 5 s more of each of 20 starts. The drills run side by side; one that is not over after --limit
seconds is ended.

OUT gets table.md, the report of each trainer (JSON, Markdown), and logs.tgz: what each drill printed, and its ranks;
torchtitan-documented.json is evidence for docs/who-resumes/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainmaster.datasets.tales import Tales
from trainmaster.drill.plan import STRIKES

HERE = Path(__file__).parent
EVERY = 5
TEXTS, TEXT_BYTES = 500, 2000  # 1 MB: more than 40 steps of 8 x 2048 bytes
# Claims that judge one strike alone; every other strike is judged by all the claims together.
CLAIM_OF = {"term": "stop", "ranks": "other ranks"} | {
    name: name for name in ("power", "full", "readonly", "truncated", "flipped", "missing", "unfinished")
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder of wheels for torchtitan")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("torchtitan", "ours"))
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="of our own trainer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--torchrun", action="store_true", help="start each by torchrun")
    parser.add_argument("--strike", action="append", choices=STRIKES, help="only these; without: every one")
    parser.add_argument("--limit", type=float, default=450.0, help="seconds for both drills")
    parser.add_argument("--titan-module", default="torchtitan.train", help="what runs in place of torchtitan's own")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tm-drill-gpu-", ignore_cleanup_errors=True) as folder:
        return _drill(given, Path(folder).resolve())


def _drill(given: argparse.Namespace, folder: Path) -> int:
    names = [given.only] if given.only else ["torchtitan", "ours"]
    path = [str(HERE.parent / "src")]
    if "torchtitan" in names:
        path += [str(HERE / "stand_in"), *([str(_unpack(given.peers, folder / "peers"))] if given.peers else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    _print_versions(env)
    commands = {"torchtitan": _titan, "ours": _ours}
    until = time.monotonic() + given.limit
    running = {}
    for name in names:
        work = folder / f"{name}-work"
        words = commands[name](work, given)
        print(f"{name}: {' '.join(words)}", flush=True)
        strikes = [word for strike in given.strike or () for word in ("--strike", strike)]
        drill = [sys.executable, "-m", "trainmaster", "drill", "--out", str(folder / name), *strikes, "--", *words]
        with (folder / f"{name}.txt").open("w") as file:
            running[name] = subprocess.Popen(drill, cwd=work, env=env, stdout=file, stderr=subprocess.STDOUT)
    began = time.monotonic()
    codes = {}
    while len(codes) < len(running) and time.monotonic() < until:
        for name, process in running.items():
            if name not in codes and (code := process.poll()) is not None:
                codes[name] = code
                print(f"{name}: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
        time.sleep(0.5)
    for name in running.keys() - codes.keys():
        print(f"{name}: not over after {given.limit:.0f} s, ended")
        running[name].send_signal(signal.SIGINT)
        running[name].wait()
    reports = {name: _keep(name, folder / name, given.out) for name in names}
    with tarfile.open(given.out / "logs.tgz", "w:gz") as file:
        for log in sorted([*folder.glob("*.txt"), *folder.glob("*/*/*/*.log")]):
            file.add(log, log.relative_to(folder))
    table = render({name: report for name, report in reports.items() if report is not None})
    (given.out / "table.md").write_text(table)
    for name, report in reports.items():
        if report is None:
            print(f"\n{name}: no report; its last lines:")
            print("\n".join((folder / f"{name}.txt").read_text().splitlines()[-15:]))
    print(f"\n{table}", flush=True)
    if report := reports.get("torchtitan"):
        (given.out / "torchtitan-documented.json").write_text(json.dumps(_evidence(report, folder), indent=1) + "\n")
    return 0 if all(report is not None and report["overall"] == "PASS" for report in reports.values()) else 1


def _titan(work: Path, given: argparse.Namespace) -> list[str]:
    """torchtitan's debug model with the settings of its debug_model.toml, which the wheel does not bring."""
    _write_assets(work / "tests" / "assets")
    return [
        *_python(given.titan_module, given),
        *("--job.dump_folder=outputs", "--model.name=llama3", "--model.flavor=debugmodel"),
        *("--model.hf_assets_path=./tests/assets/tokenizer", "--training.dataset=c4_test"),
        *("--training.local_batch_size=8", "--training.seq_len=2048", f"--training.steps={given.steps}"),
        *("--optimizer.lr=8e-4", "--lr_scheduler.warmup_steps=2", "--lr_scheduler.decay_ratio=0.8"),
        *("--metrics.log_freq=1", "--metrics.disable_color_printing"),
        *("--checkpoint.enable", f"--checkpoint.interval={EVERY}", "--checkpoint.keep_latest_k=3"),
        *("--checkpoint.no-last-save-model-only", "--debug.seed=7", "--debug.deterministic"),
    ]


def _ours(work: Path, given: argparse.Namespace) -> list[str]:
    work.mkdir()
    settings = {
        "steps": given.steps,
        "epoch_steps": 2 * EVERY,
        "batch_sequences": 16,
        "device": given.device,
        "parallel": {"compile": "off"},
        "checkpoint": {"every_steps": EVERY, "keep": 3},
    }
    (work / "run.json").write_text(json.dumps(settings))
    return [*_python("trainmaster.train", given), "run.json"]


def _python(module: str, given: argparse.Namespace) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if given.torchrun else []
    return [sys.executable, *launcher, "-m", module]


def _write_assets(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "c4_test").mkdir(parents=True)
    tales = Tales(seed=0, sequence_tokens=TEXT_BYTES)
    texts = (tales.text(number, tokens=TEXT_BYTES, held_out=False).decode() for number in range(TEXTS))
    (folder / "c4_test" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "tokenizer").mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<begin>", "eos_token": "<end>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))


def _unpack(wheels: Path, to: Path) -> Path:
    """Those that are not installed."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            tops = {name.split("/")[0].removesuffix(".py") for name in file.namelist() if ".dist-info/" not in name}
            if not any(_is_there(name) for name in tops):
                file.extractall(to)
    return to


def _is_there(package: str) -> bool:
    # `google` is shared by packages of several wheels, so protobuf is looked for by its own name.
    return importlib.util.find_spec(package) is not None and (package != "google" or _has_protobuf())


def _has_protobuf() -> bool:
    return importlib.util.find_spec("google.protobuf") is not None


def _print_versions(env: dict[str, str]) -> None:
    import torch

    sys.path += env["PYTHONPATH"].split(os.pathsep)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{gpu}; Python {platform.python_version()}, torch {torch.__version__}", end="")
    for name in ("torchtitan", "torchdata", "tyro", "tokenizers"):
        try:
            print(f", {name} {version(name)}", end="")
        except PackageNotFoundError:
            print(f", no {name}", end="")
    print(flush=True)


def _keep(name: str, proof: Path, out: Path) -> dict[str, Any] | None:
    """Copy the report; None where the drill did not come to one."""
    if not (proof / "drill.json").exists():
        return None
    for kind in ("json", "md"):
        (out / f"{name}.{kind}").write_bytes((proof / f"drill.{kind}").read_bytes())
    report: dict[str, Any] = json.loads((proof / "drill.json").read_text())
    return report


def _evidence(report: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    kept = {key: value for key, value in report.items() if key not in ("losses", "command")}
    text = json.dumps(kept).replace(f"{folder}/torchtitan/", "")
    gpu = f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU"
    return {
        "trainer": "torchtitan", "recipe": "drill-torchtitan", "kind": "documented",
        "settings": f"its debug model, `--checkpoint.enable`, on {gpu}",
        "date": datetime.now(UTC).date().isoformat(), "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "torchtitan", "torchdata")},
        **json.loads(text),
    }  # fmt: skip


def render(reports: dict[str, dict[str, Any]]) -> str:
    """Strikes as rows, then the claims, both with a column for each trainer."""
    lines = [f"| strike | {' | '.join(reports)} |", f"|---|{'---|' * len(reports)}"]
    lines += [_row(what, [_struck(report, name) for report in reports.values()]) for name, what in STRIKES.items()]
    verdicts = [f"**{report['overall']}**, {report['took_s']:.0f} s" for report in reports.values()]
    lines.append(_row("**whole**", verdicts))
    lines += ["", f"| claim | {' | '.join(reports)} |", f"|---|{'---|' * len(reports)}"]
    claims = dict.fromkeys(item["claim"] for report in reports.values() for item in report["claims"])
    for claim in claims:
        found = [next((item for item in r["claims"] if item["claim"] == claim), None) for r in reports.values()]
        lines.append(_row(claim, [f"{item['verdict']}: {item['reason']}" if item else "" for item in found]))
    return "\n".join(lines) + "\n"


def _struck(report: dict[str, Any], name: str) -> str:
    happened = [one for one in report["strikes"] if one["name"] == name]
    if not happened:
        return f"left out: {report['left_out'][name]}" if name in report["left_out"] else "not planned"
    words = [_one(one) for one in happened]
    claim = next((item for item in report["claims"] if item["claim"] == CLAIM_OF.get(name)), None)
    return f"{claim['verdict']}: {'; '.join(words)}" if claim else "; ".join(words)


def _one(one: dict[str, Any]) -> str:
    if not one["reached"]:
        return f"left out: {one['skipped']}" if one["skipped"] else "not reached"
    if not one["resumes"]:
        return "went on" if one["done_steps"] is None else f"struck after step {one['done_steps']}, no resume seen"
    resume = one["resumes"][0]
    start = "no step of the run" if resume["resumed_from"] is None else f"step {resume['resumed_from']}"
    saved = "nothing" if resume["newest_save"] is None else f"step {resume['newest_save']}"
    return f"at {one['done_steps']}, saved {saved}, on from {start}"


def _row(first: str, cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in (first, *cells))} |"


if __name__ == "__main__":
    sys.exit(main())

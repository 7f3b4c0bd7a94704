"""A plan as tables for the terminal. Everything shown is in the answer; nothing is computed here but units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from trainmaster.cli import _console
from trainmaster.cli._views import plot

_FIRST_COLUMNS, _COLUMN = 23, 8  # widths of the table of GPUs
_WHAT = {
    "weights": "as the optimizer keeps them, this GPU's share",
    "optimizer": "two moments of each weight",
    "gradients": "at that moment",
    "activations": "kept for the backward pass, and of the block at work",
    "loss": "logits of one chunk, gradients of hidden state and head",
    "gathered": "whole weights of the block at work, the next, and the root",
    "workspace": "of the matrix products",
}


def show(answer: Mapping[str, Any]) -> None:
    """All of it, the verdict first."""
    _console.out.print(_head(answer))
    _console.out.print(_verdict(answer), soft_wrap=True)
    _console.out.print()
    _console.out.print(_memory(answer))
    if answer["speed"] is not None:
        _console.out.print(_speed(answer))
    for line in (*_run(answer), *_checkpoint(answer), *_failures(answer), *_suggestion(answer)):
        _console.out.print(line, soft_wrap=True)
    _console.out.print()
    _console.out.print("[bold]Where it fits[/], tokens/s in the fastest setting that does")
    _console.out.print("[dim]– does not fit; ≤ upper bound, no published GPU-to-GPU bandwidth[/]", soft_wrap=True)
    _console.out.print(_table(answer))
    peak = answer["peak_learning_rate"]
    _console.out.print(f"\n[bold]Learning rate[/] over {answer['run']['steps']:,} steps, as a share of {peak:g}")
    for line in plot.curve([(step, rate / peak) for step, rate in answer["learning_rates"]], width=60, height=5):
        _console.out.print(line, style="cyan")
    for note in answer["notes"]:
        _console.out.print(f"[dim]note: {_console.plain(note)}[/]", soft_wrap=True)


def _head(answer: Mapping[str, Any]) -> str:
    setting = answer["setting"]
    name = answer["model"] or "a model of its own shape"
    active = "" if answer["active_parameters"] == answer["parameters"] else f" ({answer['active_parameters']:,} active)"
    passes = f", {setting['passes']} passes of {setting['micro_sequences']}" if setting["passes"] > 1 else ""
    masters = {4: "fp32", 2: "bf16"}[setting["master_bytes"]]
    return (
        f"[bold]{_console.plain(name)}[/], {answer['parameters']:,} parameters{active}\n"
        f"{answer['batch_sequences']:,} × {answer['sequence_tokens']:,} tokens a step{passes}; "
        f"recompute {setting['recompute']}, {'compiled' if setting['compiled'] else 'eager'}"
        f"{', float8' if setting['float8'] else ''}, {masters} masters, "
        f"one copy of the weights over {setting['shard_ranks']} GPU(s)"
    )


def _verdict(answer: Mapping[str, Any]) -> str:
    memory, where = answer["memory"], _where(answer)
    needed = _gib(memory["needed_bytes"])
    if answer["fits"] is None:
        return f"[bold]needs {needed}[/] on each of {where}; name a model with --gpu for a verdict"
    room = memory["gpu_bytes"] - memory["needed_bytes"]
    if answer["fits"]:
        return f"[bold green]fits[/] {where}: {needed} of {_gib(memory['gpu_bytes'])}, {_gib(room)} free"
    lines = [
        f"[bold red]does not fit[/] {where}: needs {needed} of {_gib(memory['gpu_bytes'])}, {_gib(-room)} too much"
    ]
    ways = list(answer["would_fit"])
    if answer["suggestion"] is not None:
        ways.insert(0, " ".join(answer["suggestion"]["overrides"]))
    lines += [f"  would fit: {_console.plain(way)}" for way in ways] or ["  nothing that is known here would hold it"]
    return "\n".join(lines)


def _memory(answer: Mapping[str, Any]) -> Table:
    memory = answer["memory"]
    table = Table(title=f"Memory of each GPU, fullest at: {memory['moment']}", title_justify="left", box=None)
    for name in ("part", "size", "what"):
        table.add_column(name, justify="right" if name == "size" else "left", style="dim" if name == "what" else None)
    for name, size in memory["parts_bytes"].items():
        if size:
            table.add_row(name, _gib(size), _WHAT[name])
    table.add_row(
        "[bold]peak[/]", f"[bold]{_gib(memory['peak_bytes'])}[/]", "what torch.cuda.max_memory_allocated shows"
    )
    table.add_row("reserve", _gib(memory["reserve_bytes"]), "CUDA's context, NCCL, what the allocator cannot use")
    table.add_row("host, pinned", _gib(memory["host_pinned_bytes"]), "of each node, to stage checkpoints")
    return table


def _speed(answer: Mapping[str, Any]) -> Table:
    speed = answer["speed"]
    title = (
        f"Speed: {speed['tokens_per_s']:,.0f} tokens/s ({speed['tokens_per_s_per_gpu']:,.0f} a GPU), "
        f"MFU {speed['mfu']:.1%}, {_seconds(speed['step_s'])} a step"
    )
    table = Table(title=title, title_justify="left", box=None, min_width=len(title))
    table.add_column("work")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in speed["parts_s"].items():
        table.add_row(name, _seconds(seconds), f"{seconds / speed['step_s']:.0%}")
    return table


def _run(answer: Mapping[str, Any]) -> list[str]:
    run = answer["run"]
    whole = f"[bold]Whole run[/] {run['steps']:,} steps, {_short(run['tokens'])} tokens"
    if run["seconds"] is None:
        return ["", f"{whole}; how long is not known: {_console.plain(answer['speed_unknown'])}"]
    cost = "name a --gpu-price or an --instance for the cost"
    if run["usd"] is not None:
        cost = f"[bold]${run['usd']:,.2f}[/] at ${run['usd_per_gpu_hour']:.2f} a GPU hour"
    return ["", f"{whole}: [bold]{_long(run['seconds'])}[/], {run['gpu_hours']:,.1f} GPU hours, {cost}"]


def _checkpoint(answer: Mapping[str, Any]) -> list[str]:
    saved = answer["checkpoint"]
    staged = f"{_seconds(saved['stage_s'])} off the GPU, " if saved["stage_s"] is not None else ""
    return [
        f"[bold]Checkpoint[/] {saved['bytes'] / 1e9:,.1f} GB: {staged}{_seconds(saved['write_s'])} to disk at "
        f"{saved['write_gbps_per_node']:g} GB/s a node; room for {saved['kept_bytes'] / 1e9:,.1f} GB"
    ]


def _failures(answer: Mapping[str, Any]) -> list[str]:
    row, own = answer["failures"], answer["checkpoint"]["every_steps"]
    if row["ettr"] is None:
        return []
    source = "" if row["mttf_source"] == "stated" else f" ({row['mttf_source']})"
    return [
        f"[bold]Failures[/] one in {_long(row['mttf_h'] * 3600)}{_console.plain(source)}, "
        f"{_seconds(row['restart_s'])} to the next step: ETTR [bold]{row['ettr']:.2%}[/] with a save every "
        f"{row['best_every_steps']:,} steps ({_long(row['best_every_s'])}), {row['ettr_as_configured']:.2%} with "
        f"checkpoint.every_steps={own}"
    ]


def _suggestion(answer: Mapping[str, Any]) -> list[str]:
    suggestion = answer["suggestion"]
    if suggestion is None:
        return []
    if not suggestion["overrides"]:
        return ["[bold]Fastest[/] these settings are the fastest that fit"]
    speed = f"{suggestion['tokens_per_s']:,.0f} tokens/s, " if suggestion["tokens_per_s"] is not None else ""
    return [
        f"[bold]Fastest[/] that fits: {speed}{_gib(suggestion['needed_bytes'])} of each GPU",
        f"  {_console.plain(suggestion['command'])}",
    ]


def _table(answer: Mapping[str, Any]) -> Table:
    counts = [cell["gpus"] for cell in answer["table"][0]["counts"]] if answer["table"] else []
    shown = max(3, (_console.out.width - _FIRST_COLUMNS) // _COLUMN)  # the JSON has all of them
    table = Table(box=None)
    table.add_column("GPU", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    for count in counts[:shown]:
        table.add_column(f"× {count}", justify="right", no_wrap=True)
    for row in answer["table"]:
        size = f"{row['gpu_bytes'] / 2**30:.0f}"
        table.add_row(row["gpu"], size, *(_cell(cell) for cell in row["counts"][:shown]))
    return table


def _cell(cell: Mapping[str, Any]) -> str:
    if not cell["fits"]:
        return "[dim]–[/]"
    if cell["tokens_per_s"] is None:
        return "[green]fits[/]"
    return f"[green]{'' if cell['bus_known'] else '≤'}{_short(cell['tokens_per_s'])}[/]"


def _where(answer: Mapping[str, Any]) -> str:
    nodes = f" on {answer['nodes']} nodes" if answer["nodes"] > 1 else ""
    return f"{answer['gpus']} × {answer['gpu'] or 'GPU'}{nodes}"


def _gib(size: float, *, digits: int = 1) -> str:
    return f"{size / 2**30:,.{digits}f} GiB" if size >= 2**29 or not size else f"{size / 2**20:,.0f} MiB"


def _short(number: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return (
                f"{number / limit:.3g}{unit}"
                if number < 999.5 * limit or unit == "T"
                else f"{number / limit:.0f}{unit}"
            )
    return f"{number:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _long(seconds: float) -> str:
    for limit, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * limit:
            return f"{seconds / limit:,.1f} {unit}"
    return f"{seconds:,.1f} s"

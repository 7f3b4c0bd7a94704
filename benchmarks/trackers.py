"""Trainmaster beside MLflow, Aim and TensorBoard: the same runs, machine and browser; load, zoom, memory and disk.

    PYTHONPATH=src:tests .venv/bin/python -P benchmarks/trackers.py FOLDER --runs 50 --points 1000
    PYTHONPATH=src:tests .venv/bin/python -P benchmarks/trackers.py FOLDER --write docs/how/trackers.md     500 × 10,000

Each product is installed from PyPI into an environment of its own below FOLDER, written to as its documentation
recommends (tracker_parts/tracker_writers.py), and served by its own command with its default settings. A page is loaded
when its picture has stopped to change: Chromium sends a frame for each change, and the time of the last one counts, for
every product alike. Spinners count as changes. What a page needs to show the curves (a click, a choice) is part of its
load. What was written is kept in FOLDER, so that the pages alone can be measured again; two calls with `--only` and
`--no-pages` write two products at a time. Pages are measured in turns, a round of each product after the other, all
servers being up: what else the machine does is then the same for all. Each visit has a browser of its own, which is
ended where a page answers nothing any more; the load that was measured before stays.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import BrowserType, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent / "tracker_parts"))
from tracker_visits import LONGEST_S, Seen, family, visit

ROOT = Path(__file__).parents[1]
MANY = 200  # runs in one chart; the most that a comparison of Trainmaster takes
PRODUCTS = ("trainmaster", "mlflow", "aim", "tensorboard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PRODUCTS))
    parser.add_argument("--no-pages", action="store_true", help="write the runs and measure no page")
    parser.add_argument("--write", type=Path, help="page for the table")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    pythons: dict[str, str] = {}
    for product in options.only.split(","):
        print(f"{product} …", flush=True)
        try:
            pythons[product] = install(product, options.folder)
            results[product] = write(product, pythons[product], place(product, options), options)
        except Exception as error:  # one product that fails is said in its row, and the others are measured
            results[product] = {"fault": " ".join(str(error).split())[:300]}
    if not options.no_pages:
        measure(results, pythons, options)
    for product, row in results.items():
        print(f"{product}: {json.dumps({name: value for name, value in row.items() if name != 'ids'})}", flush=True)
    page = render(results, options)
    print(page)
    if options.write is not None:
        options.write.write_text(page, encoding="utf-8")


def place(product: str, options: argparse.Namespace) -> Path:
    found: Path = options.folder / f"{product}-{options.runs}x{options.points}"
    return found


def install(product: str, folder: Path) -> str:
    """The Python of the product's environment, which is made where it is not there."""
    if product == "trainmaster":
        return sys.executable
    home = folder.resolve() / f"env-{product}"
    if not (home / "bin" / product).exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        made = subprocess.run(
            [home / "bin" / "pip", "install", "-q", product], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise RuntimeError(f"pip install {product}: {made.stderr.strip().splitlines()[-1]}")
    return str(home / "bin" / "python")


def write(product: str, python: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Have the runs written, unless an earlier call has."""
    done = work / "written.json"
    if not done.exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        script = str(ROOT / "benchmarks" / "tracker_parts" / "tracker_writers.py")
        words = [python, "-P", script, product, str(work.resolve()), str(options.runs), str(options.points)]
        own = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}" if product == "trainmaster" else ""}
        made = subprocess.run(words, capture_output=True, text=True, cwd=work, check=False, env={**os.environ, **own})
        if made.returncode:
            raise RuntimeError(f"writing: {made.stderr[-300:]}")
        size = sum(path.stat().st_size for path in work.rglob("*") if path.is_file() and not path.is_symlink())
        ask = f"from importlib.metadata import version; print(version({product!r}))"
        version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
        told = json.loads(made.stdout.strip().splitlines()[-1])
        found = {"written": options.runs, **told, "disk_mb": round(size / 1e6, 1), "version": version}
        done.write_text(json.dumps(found))
    read: dict[str, Any] = json.loads(done.read_text())
    return read | {each: round(read[each] / read["written"], 2) for each in ("write_s", "write_cpu_s")}


@contextlib.contextmanager
def served(product: str, python: str, work: Path) -> Iterator[tuple[str, int, float]]:
    """The product's own server: its address, its process, and the seconds until it answered."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bin_, here = Path(python).parent, work.resolve()
    at = ["--host", "127.0.0.1", "--port", str(port)]
    # On a busy machine its four workers take longer to start than the 5 s after which it would end them, each time.
    patient = ["--uvicorn-opts", "--timeout-worker-healthcheck 120"]
    command = {
        "trainmaster": [bin_ / "trainmaster", "serve", "--home", here, "--trust-loopback", *at],
        "mlflow": [bin_ / "mlflow", "server", "--backend-store-uri", f"sqlite:///{here}/mlflow.db", *patient, *at],
        "aim": [bin_ / "aim", "up", "--repo", here, "--yes", *at],
        "tensorboard": [bin_ / "tensorboard", "--logdir", here, *at],
    }[product]
    began = time.monotonic()
    with (work / "server.log").open("wb") as log:
        own = {**os.environ, "PYTHONPATH": str(ROOT / "src") if product == "trainmaster" else ""}
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, start_new_session=True, env=own)
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
                    break
                if server.poll() is not None or time.monotonic() - began > 300:
                    raise RuntimeError(f"its server does not answer: {(work / 'server.log').read_text()[-200:]}")
                time.sleep(0.2)
            yield url, server.pid, time.monotonic() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, 15)  # a group of its own, made above
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, 9)


def measure(results: dict[str, dict[str, Any]], pythons: dict[str, str], options: argparse.Namespace) -> None:
    """Load of one run and of many, zoom of many, memory of the tab and of the server: into the row of each product."""
    with contextlib.ExitStack() as open_:
        chromium = open_.enter_context(sync_playwright()).chromium
        up: dict[str, tuple[str, int]] = {}
        for product in [each for each, row in results.items() if "fault" not in row]:
            try:
                server = served(product, pythons[product], place(product, options))
                url, pid, start_s = open_.enter_context(server)
                results[product]["ready_s"] = round(start_s + PAGES[product].wait(url, options.runs), 1)
                up[product] = url, pid
            except Exception as error:  # the others are measured all the same
                fail(results[product], "server", error)
        seen, busy = take_turns(chromium, {each: url for each, (url, _) in up.items()}, results, options)
        for (product, name), visits in seen.items():
            results[product] |= {f"{name}_{figure}": value for figure, value in summarize(visits).items()}
        for product, (_, pid) in up.items():
            results[product] |= {"server_mb": round(sum(map(rss_mb, family(pid)))), "busy": _middle(busy[product], 1)}


FIGURES = ("load_ms", "zoom_ms", "heap_mb")


def summarize(visits: list[Seen]) -> dict[str, Any]:
    """The median of each figure; one that no visit has was given up."""
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = [value for each in visits if (value := getattr(each, name)) is not None]
        figures[name] = _middle(values, 1 if name == "heap_mb" else 0) if values else "given up"
    return figures


Turns = tuple[dict[tuple[str, str], list[Seen]], dict[str, list[float]]]


def take_turns(chromium: BrowserType, urls: dict[str, str], rows: dict[str, Any], options: argparse.Namespace) -> Turns:
    """Load, zoom and heap of each visit by product and page; the load of the machine after each visit."""
    seen: dict[tuple[str, str], list[Seen]] = {}
    busy: dict[str, list[float]] = {product: [] for product in urls}
    gone = set()
    for number in range(options.rounds):
        for (product, url), name in itertools.product(urls.items(), ("one", "many")):
            if (product, name) in gone:
                continue
            opened, row, picture = getattr(PAGES[product], name), rows[product], place(product, options)
            try:
                figures = visit(chromium, opened, url, row, picture / f"{name}-{number}")
                seen.setdefault((product, name), []).append(figures)
                shown = ", ".join(f"{figure} {value}" for figure, value in summarize([figures]).items())
                print(f"{product}, {name}, {number}: {shown}; machine {os.getloadavg()[0]:.1f}", flush=True)
                if figures.fault is not None:
                    raise figures.fault
            except Exception as error:  # its other page is measured all the same
                gone.add((product, name))
                fail(row, f"{name}, round {number}", error)
            busy[product].append(os.getloadavg()[0])
    for product, name in gone - set(seen):
        rows[product] |= {f"{name}_{figure}": "given up" for figure in FIGURES}
    return seen, busy


def fail(row: dict[str, Any], name: str, error: Exception) -> None:
    """Say what a product did not do; it is not asked for it again."""
    said = f"{name}: {' '.join(str(error).split())[:200]}"
    print(said, flush=True)
    row["fault"] = f"{row['fault']}; {said}" if "fault" in row else said


class Trainmaster:
    @staticmethod
    def wait(_url: str, _runs: int) -> float:
        return 0.0

    @staticmethod
    def one(tab: Page, url: str, written: dict[str, Any]) -> str:
        tab.goto(f"{url}/jobs/{written['ids'][7]}")
        tab.locator("#curves[data-drawn=whole]").wait_for(timeout=1000 * LONGEST_S)
        return "#curves canvas"

    @staticmethod
    def many(tab: Page, url: str, written: dict[str, Any]) -> str:
        tab.goto(f"{url}/compare?jobs={','.join(written['ids'][:MANY])}")
        tab.locator("#comparison[data-drawn]").wait_for(timeout=1000 * LONGEST_S)
        tab.locator("#overlay").scroll_into_view_if_needed()
        return "#overlay"


class Mlflow:
    wait = Trainmaster.wait

    @staticmethod
    def one(tab: Page, url: str, written: dict[str, Any]) -> str:
        tab.goto(f"{url}/#/experiments/{written['experiment']}/runs/{written['ids'][7]}/model-metrics")
        tab.locator(".js-plotly-plot .scatterlayer path.js-line").first.wait_for(timeout=1000 * LONGEST_S)
        return ".js-plotly-plot .nsewdrag"

    @staticmethod
    def many(tab: Page, url: str, written: dict[str, Any]) -> str:
        runs, experiments = (quote(json.dumps(each)) for each in (written["ids"][:MANY], [written["experiment"]]))
        plotted = quote(json.dumps(["loss"]))
        tab.goto(f"{url}/#/metric?runs={runs}&experiments={experiments}&metric=%22loss%22&plot_metric_keys={plotted}")
        tab.locator(".js-plotly-plot .scatterlayer path.js-line").nth(min(MANY, len(written["ids"])) // 2).wait_for(
            timeout=1000 * LONGEST_S, state="attached"
        )
        return ".js-plotly-plot .nsewdrag"


class Aim:
    wait = Trainmaster.wait

    @staticmethod
    def one(tab: Page, url: str, written: dict[str, Any]) -> str:
        """Its page of a run has no zoom; its explorer has, of one run as of many."""
        return _explore(tab, url, f'metric.name == "loss" and run.hash == "{written["ids"][7]}"')

    @staticmethod
    def many(tab: Page, url: str, _written: dict[str, Any]) -> str:
        return _explore(tab, url, f'metric.name == "loss" and run.number < {MANY}')


def _explore(tab: Page, url: str, query: str) -> str:
    select = {"advancedMode": True, "advancedQuery": query, "options": [], "query": ""}
    # As its own page writes the choice into the address.
    coded = base64.b64encode(quote(json.dumps(select), safe=";,/?:@&=+$-_.!~*'()#").encode()).decode().rstrip("=")
    tab.goto(f"{url}/metrics?select=O-{coded.replace('+', '-').replace('/', '_')}")
    tab.locator("svg.Visualization path").first.wait_for(timeout=1000 * LONGEST_S, state="attached")
    return "svg.Visualization"


class TensorBoard:
    @staticmethod
    def wait(url: str, runs: int) -> float:
        """Its server reads the files in the background: seconds until it has every run."""
        began = time.monotonic()
        have = 0
        while time.monotonic() - began < 1800:
            with urllib.request.urlopen(f"{url}/data/plugin/scalars/tags", timeout=60) as answer:
                have = len(json.load(answer))
            if have >= runs:
                return time.monotonic() - began
            time.sleep(0.5)
        raise RuntimeError(f"its server has {have} of {runs} runs after 30 min")

    @staticmethod
    def one(tab: Page, url: str, _written: dict[str, Any]) -> str:
        return _choose(tab, f"{url}/?runFilter=%5Erun-7%24#timeseries")

    @staticmethod
    def many(tab: Page, url: str, _written: dict[str, Any]) -> str:
        assert MANY == 200, "the filter below is of runs 0 to 199"
        return _choose(tab, f"{url}/?runFilter=%5Erun-1%3F%5B0-9%5D%7B1%2C2%7D%24#timeseries")


def _choose(tab: Page, url: str) -> str:
    """Of many runs it shows none until they are chosen: by the box above them."""
    tab.goto(url)
    tab.locator("line-chart line-chart-interactive-view").first.wait_for(timeout=1000 * LONGEST_S)
    box = tab.locator("mat-checkbox input").first
    if not box.is_checked():
        box.click()
    return "line-chart line-chart-interactive-view"


PAGES: dict[str, Any] = {"trainmaster": Trainmaster, "mlflow": Mlflow, "aim": Aim, "tensorboard": TensorBoard}


def rss_mb(pid: int) -> float:
    """Memory of a process that no other shares, so that workers are not counted twice."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return 0.0


def _middle(values: list[float], digits: int = 0) -> float:
    return round(statistics.median(values), digits or None)


ROWS = {
    "version": "version", "written": "runs of which the two below are means", "write_s": "writing a run, s",
    "write_cpu_s": "writing a run, CPU s",
    "disk_mb": "disk, MB", "ready_s": "server ready, s",
    "one_load_ms": "one run: load, ms", "one_zoom_ms": "one run: zoom, ms",
    "one_heap_mb": "one run: heap of the tab, MB",
    "many_load_ms": "{many} runs: load, ms", "many_zoom_ms": "{many} runs: zoom, ms",
    "many_heap_mb": "{many} runs: heap of the tab, MB", "server_mb": "memory of the server after it, MB",
    "busy": "load of the machine meanwhile (1 min)",
}  # fmt: skip


def render(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """The page of the table."""
    names = list(results)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [
        "# Trainmaster beside other trackers", "",
        f"{options.runs} runs of {options.points:,} points of one metric, written to each product as its documentation",
        "recommends and shown by its own server with default settings, in one browser on one machine",
        f"({datetime.now(UTC):%Y-%m-%d}, {machine}; medians of {options.rounds}, in turns). Made by", "", "```",
        f"PYTHONPATH=src:tests python -P benchmarks/trackers.py FOLDER --runs {options.runs} --points {options.points}",
        "```", "", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}",
    ]  # fmt: skip
    for key, label in ROWS.items():
        cells = [str(results[name].get(key, "not measured")) for name in names]
        lines.append(f"| {label.format(many=min(MANY, options.runs))} | {' | '.join(cells)} |")
    lines += ["", *(f"{name}: not (all) measured: {row['fault']}" for name, row in results.items() if "fault" in row)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()

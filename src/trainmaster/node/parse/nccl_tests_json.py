"""The file that nccl-tests writes with `-J` (versions 1 to 3 of it; src/util.cu of NVIDIA/nccl-tests).

One file is one run. Files that were joined, or collected in a list, are as many runs.
"""

from __future__ import annotations

import re
from typing import Any

from trainmaster.node.parse import ParseError, load_json, read_float, read_int, shorten
from trainmaster.node.parse.nccl_tests_data import (
    Device,
    Measure,
    Row,
    Run,
    collective_of,
    contradicts,
    expected_sizes,
    find_lost_sizes,
    find_shared_gpu,
    measure,
    proven_ranks,
)

_MOST_RANKS = 4096  # of one process
_JOINT = re.compile(r"(?<=[}\]])\s*(?=[{\[])")  # end of a document and start of the next; lists have a comma there


def parse_documents(text: str) -> tuple[Run, ...]:
    """The runs of one report, of several that were joined, or of a list of them."""
    reports: list[Any] = []
    try:
        documents = [load_json(text)]
    except ParseError:
        parts = _JOINT.split(text.strip())
        if len(parts) < 2:
            raise
        documents = [load_json(part) for part in parts]
    for document in documents:
        reports += document if isinstance(document, list) else [document]
    if not reports:
        raise ParseError("the JSON holds no report of nccl-tests")
    return tuple(parse_json(document) for document in reports)


def parse_json(document: Any) -> Run:
    """One run. Its `env` is not kept: it holds whatever secrets the environment held."""
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise ParseError("the JSON is not a report of nccl-tests: no `results` in it")
    faults: list[str] = []
    args = document.get("args")
    program = args[0] if isinstance(args, list) and args and isinstance(args[0], str) else ""
    collective = collective_of(program)
    if collective is None:
        faults.append("the report does not name its program")
    rows = tuple(row for item in document["results"] if (row := _row(item, collective, faults)) is not None)
    bounds = document.get("out_of_bounds")
    bounds = bounds if isinstance(bounds, dict) else {}
    count = read_int(bounds.get("count"))
    if count is None or bounds.get("okay") not in ("true", "false"):
        faults.append("the report ends without its summary: the run was cut off or it died")
    if "end_time" not in document:
        faults.append("the report has no end")
    errors = document.get("errors") or []
    for error in errors if isinstance(errors, list) else [errors]:
        if error:
            faults.append(f"the tool reported an error: {shorten(str(error))}")
    config = document.get("config")
    config = config if isinstance(config, dict) else {}
    process_ranks = _process_ranks(config, faults)
    devices = _devices(config, process_ranks, faults)
    if not rows:
        faults.append("the report holds no row")
    if proven_ranks(rows, collective) == (1, 0):
        faults.append("the bandwidths of the rows fit no number of ranks")
    _match_sizes(config, rows, collective, len(devices) * process_ranks, faults)
    average = document.get("average_bus_bandwidth")
    check = read_int(config.get("validation"))
    version = read_int(document.get("nccl_version"))
    return Run(
        collective=collective,
        devices=devices,
        process_ranks=process_ranks,
        rows=rows,
        out_of_bounds=count,
        average_busbw_gbps=read_float(average.get("bandwidth")) if isinstance(average, dict) else None,
        corrupt=bool(count) or bounds.get("okay") == "false" or any(_wrong(item) for item in document["results"]),
        validated=None if check is None else check != 0,
        nccl_version=None if version is None else str(version),
        faults=tuple(faults),
    )


def _wrong(item: Any) -> bool:
    """Whether a row tells of wrong values, also one that cannot be read otherwise."""
    sides = item.values() if isinstance(item, dict) else ()
    return any(isinstance(side, dict) and bool(read_float(side.get("nwrong"))) for side in sides)


def _row(item: Any, collective: str | None, faults: list[str]) -> Row | None:
    size = read_int(item.get("size")) if isinstance(item, dict) else None
    if size is None or size < 0:
        faults.append("a row of the report has no size")
        return None
    # `null` means that a side was not run; a side that is not there at all is damage.
    sides = [_side(item.get(name, ""), size, name, collective, faults) for name in ("out_of_place", "in_place")]
    return Row(
        size_bytes=size,
        count=read_int(item.get("count")) or 0,
        dtype=str(item.get("type")),
        redop=str(item["redop"]) if item.get("redop") else None,
        root=read_int(item.get("root")),
        out_of_place=sides[0],
        in_place=sides[1],
    )


def _side(cells: Any, size: int, name: str, collective: str | None, faults: list[str]) -> Measure | None:
    if cells is None and name == "out_of_place":
        return None  # trace replay measures in place only
    if not isinstance(cells, dict):
        faults.append(f"the row of {size} bytes has no {name} result")
        return None
    printed = cells.get("nwrong")
    wrong_values = read_float(printed)
    if "nwrong" not in cells or (printed is not None and (wrong_values is None or wrong_values < 0)):
        faults.append(f"the row of {size} bytes does not say how many values were wrong")
    side, whole = measure(
        time=_text(cells.get("time", cells.get("cpu_time"))),
        algbw=_text(cells.get("alg_bw")),
        busbw=_text(cells.get("bus_bw")),
        wrong=None if wrong_values is None else int(wrong_values + 0.999),
    )
    if not whole:
        faults.append(f"the row of {size} bytes holds something that is no number")
    elif "time" in cells and collective != "hypercube" and contradicts(size, side):
        faults.append(f"time and bandwidth of the row of {size} bytes contradict each other")
    return side


def _text(value: object) -> str:
    """A number as the file's `%lf` printed it, with its six decimals."""
    number = read_float(value)
    return "" if number is None or isinstance(value, str) else f"{number:.6f}"


def _process_ranks(config: dict[str, Any], faults: list[str]) -> int:
    """Ranks of each process: -t threads of -g GPUs; 1 where a file states neither."""
    if "nthreads" not in config and "ngpus" not in config:
        return 1
    threads, gpus = read_int(config.get("nthreads")), read_int(config.get("ngpus"))
    if threads is None or gpus is None or not 0 < threads * gpus <= _MOST_RANKS:
        faults.append("the report does not tell how many GPUs each process used")
        return 1
    return threads * gpus


def _devices(config: dict[str, Any], process_ranks: int, faults: list[str]) -> tuple[Device, ...]:
    """The first device of each process, which is all that the file lists."""
    devices: list[Device] = []
    items = config.get("devices")
    for item in items if isinstance(items, list) else []:
        rank, device = (
            (read_int(item.get(key)) for key in ("rank", "device")) if isinstance(item, dict) else (None, None)
        )
        if rank is None or device is None or not isinstance(item.get("hostname"), str):
            faults.append("a device of the report cannot be read")
            continue
        devices.append(
            Device(
                rank=rank,
                host=item["hostname"],
                device=device,
                bus_id=str(item.get("device_hex")),
                name=str(item.get("device_info")),
                pid=read_int(item.get("pid")),
                group=read_int(item.get("group")),
            )
        )
    if not devices:
        faults.append("the report lists no device")
    ranks = sorted(device.rank for device in devices)
    if len(set(ranks)) < len(ranks):
        faults.append("the report lists a rank twice")
    elif ranks != list(range(0, len(ranks) * process_ranks, process_ranks)):
        faults.append(f"the ranks listed are {shorten(str(ranks))}: some processes are missing")
    shared = find_shared_gpu(devices)
    faults += [] if shared is None else [shared]
    return tuple(devices)


def _match_sizes(
    config: dict[str, Any], rows: tuple[Row, ...], collective: str | None, ranks: int, faults: list[str]
) -> None:
    low, high = read_int(config.get("minimum_bytes")), read_int(config.get("maximum_bytes"))
    factor, step = read_int(config.get("step_factor")), read_int(config.get("step_bytes"))
    sizes = expected_sizes(low, high, factor=factor, step=step)
    if sizes is None:
        faults.append("the report does not tell which sizes were asked for")
    elif (lost := find_lost_sizes(rows, sizes, collective, ranks)) is not None:
        faults.append(lost)

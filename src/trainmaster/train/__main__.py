"""One rank of a training run: `python -m trainmaster.train CONFIG`, started once per rank by any launcher.

CONFIG is JSON, or YAML where PyYAML is installed; values are put over it as with `trainmaster train`:
`torchrun --nproc-per-node 8 -m trainmaster.train llama.yaml steps=500 --log-level DEBUG`.

Exit codes: 0 trained to the last step; 75 stopped on request and saved; 66 checkpoints exist and none can be trusted,
or there is none to resume from; 67 bad steps came back after every rollback; 69 another run writes there; 65 the data
cannot be read; 2 wrong config; 1 anything else, with its last line saying what.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import CheckpointError, CheckpointInUse, DataError, SpecError, TrainmasterError, UsageError
from trainmaster.core.plan import (
    CHECKPOINTS_VARIABLE,
    EVENTS_VARIABLE,
    EXIT_REASONS,
    GROUPS_VARIABLE,
    RESUMABLE_EXIT,
    RESUME_VARIABLE,
    STOP_VARIABLE,
)
from trainmaster.core.schema import YEAR_S, build_new
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.node.quorum import Quorum
from trainmaster.node.ranks import detect
from trainmaster.train.metrics.trackers import check_trackers
from trainmaster.train.parallel.rank_info import RankInfo, find_rank_info
from trainmaster.train.run_log import RunLog, flush_output, print_traceback
from trainmaster.train.start_times import StartTimes
from trainmaster.train.watch.launcher import LauncherWatch
from trainmaster.train.watch.oom import explain_memory, find_absurd
from trainmaster.train.watch.stop import Stop
from trainmaster.train.watch.watchdog import Watchdog, exchange_ranks

TIMEOUT_VARIABLE = "TRAINMASTER_COLLECTIVE_TIMEOUT_S"
_BAD_CHECKPOINT = next(code for code, reason in EXIT_REASONS.items() if reason is Reason.BAD_CHECKPOINT)
_IN_USE = next(code for code, reason in EXIT_REASONS.items() if reason is Reason.CHECKPOINT_IN_USE)
_BAD_DATA = next(code for code, reason in EXIT_REASONS.items() if reason is Reason.BAD_DATA)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run this rank and return the exit code of the process."""
    stop = Stop(environ.get(STOP_VARIABLE))
    stop.listen()
    try:
        config, rank_info = read_config(arguments), find_rank_info(detect(environ))
        faults = list(config.faults_on(rank_info.world_size))
        if faults:
            raise SpecError(faults)
        check_trackers(config.watch)
        rank_info = rank_info.in_group(config.recovery.groups)
        quorum = find_quorum(rank_info, environ)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    events = environ.get(EVENTS_VARIABLE) if rank_info.rank == 0 else None
    try:
        run_log = RunLog(rank_info, Emitter(events) if events else None, level=config.log_level)
    except OSError as error:
        RunLog(rank_info, None).alarm(f"error: the event file {events} ({EVENTS_VARIABLE}) cannot be opened: {error}")
        return 1
    if quorum is not None:
        view = quorum.read()
        run_log.lead(view.lead == rank_info.group and view.has(rank_info.group, rank_info.restart))
    try:
        with LauncherWatch(environ, stop=stop, run_log=run_log) as launcher:
            return train(config, rank_info, environ, stop=stop, run_log=run_log, launcher=launcher)
    except CheckpointInUse as error:
        run_log.alarm(f"checkpoint error: {error}")
        return _IN_USE
    except CheckpointError as error:
        run_log.alarm(f"checkpoint error: {error}")
        return _BAD_CHECKPOINT
    except DataError as error:
        run_log.alarm(f"data error: {error}")
        return _BAD_DATA
    except TrainmasterError as error:
        run_log.alarm(f"error: {error}")
        return error.exit_code
    except Exception as error:
        print_traceback()
        run_log.alarm(_last_words(error))
        return 1


def read_config(arguments: Sequence[str]) -> TrainConfig:
    """Read the config file that the first argument names; the others are values to put over its own."""
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("usage: python -m trainmaster.train CONFIG [key.path=value …], CONFIG a file in JSON or YAML")
    path, words = Path(arguments[0]), arguments[1:]
    try:
        if words or path.suffix in (".yaml", ".yml"):
            return _read_yaml(path, words)
        return build_new(TrainConfig, json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deep; a config is a page of text") from None


def find_quorum(rank_info: RankInfo, environ: Mapping[str, str]) -> Quorum | None:
    """The quorum of the replica groups; None where there are none."""
    if rank_info.groups == 1:
        return None
    folder = environ.get(GROUPS_VARIABLE)
    if not folder:
        raise UsageError(
            "train.recovery.groups: groups are started and kept by our agent (`trainmaster train`, a job); under "
            "another launcher leave it out"
        )
    return Quorum(Path(folder))


def _read_yaml(path: Path, words: Sequence[str]) -> TrainConfig:
    """A config as YAML, of which JSON is a part; with `key=value` words and options put over it."""
    try:
        from trainmaster.documents import yaml_file  # not part of the node half: plans are JSON
    except ImportError:
        message = "YAML and key=value need PyYAML here (pip install pyyaml); or write all of the config as JSON"
        raise UsageError(f"{path}: {message}") from None
    values = yaml_file.join_options(words)
    return yaml_file.load(path).read(lambda value: build_new(TrainConfig, yaml_file.override(value, values)), values)


def with_time_limit(config: TrainConfig, environ: Mapping[str, str]) -> TrainConfig:
    """The config with the time limit of the environment, if there is one."""
    text = environ.get(TIMEOUT_VARIABLE)
    if not text:
        return config
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit <= YEAR_S:
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r}: write seconds, above 0 and at most {YEAR_S:.0f}")
    return replace(config, timeouts=replace(config.timeouts, first_step_s=limit, step_s=limit))


def train(
    config: TrainConfig,
    rank_info: RankInfo,
    environ: Mapping[str, str],
    *,
    stop: Stop,
    run_log: RunLog,
    launcher: LauncherWatch,
) -> int:
    """Join the process group, train, leave. After a failure the group is not left: the others may be gone."""
    # Imported here, after the signals are taken: torch takes seconds, and a stop in them must count.
    from trainmaster.train import loop
    from trainmaster.train.parallel import shard
    from trainmaster.train.watch import flight_recorder

    times = StartTimes(run_log, environ, restart=rank_info.restart)
    times.done("imports")
    flight_recorder.prepare()
    folder = Path(config.checkpoint.folder or environ.get(CHECKPOINTS_VARIABLE) or "checkpoints").absolute()
    device = shard.pick_device(config.device, rank_info)
    if config.deterministic and device.type == "cuda":
        shard.use_one_order()
    shard.use_device(device, rank_info)
    times.done("device")
    config = with_time_limit(config, environ)
    if fault := find_absurd(config, rank_info, device_bytes=shard.memory_of(device), host_bytes=shard.memory_of_host()):
        raise SpecError([fault])
    watchdog = Watchdog(rank_info, stop=stop, run_log=run_log, timeout_s=config.timeouts.step_s)
    with launcher.waiting_for_peers() if rank_info.world_size > 1 else nullcontext():
        world = shard.join(rank_info, device, timeout_s=config.timeouts.first_step_s)
        ranks, connect = exchange_ranks(rank_info)
    kind = loop.Trainer
    if rank_info.groups > 1:
        from trainmaster.train.group_trainer import GroupTrainer

        world, kind = replace(world, quorum=Path(environ[GROUPS_VARIABLE])), GroupTrainer
    watchdog.start(ranks, connect)
    times.done("rendezvous")
    try:
        outcome = loop.run(
            config,
            world,
            folder=folder,
            stop=stop,
            run_log=run_log,
            watchdog=watchdog,
            resume_from=environ.get(RESUME_VARIABLE),
            times=times,
            kind=kind,
        )
    except TrainmasterError:
        raise
    except Exception as error:
        watchdog.await_verdict()  # the others may be leaving together, and so should this one
        run_log.close()
        print_traceback()
        run_log.alarm(explain_memory(error, config, world) or _last_words(error, watchdog))
        return 1
    watchdog.end()
    shard.leave()
    return RESUMABLE_EXIT if outcome.stopped else 0


def _last_words(error: Exception, watchdog: Watchdog | None = None) -> str:
    text = (str(error).splitlines() or [""])[0]
    # torch has no one type for it: gloo raises RuntimeError, the store DistNetworkError, NCCL DistBackendError.
    if any(word in f"{type(error).__name__} {error}".lower() for word in ("gloo", "nccl", "distnetwork", "diststore")):
        who = watchdog.explain() if watchdog is not None else None
        return f"failed: another rank is gone or hangs, see its log: {f'{who}: ' if who else ''}{text}"
    return f"failed: {type(error).__name__}: {text}"


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    flush_output()
    # Past the interpreter's own ending: a process group whose peer died can wait in its destructor for ever.
    os._exit(code)

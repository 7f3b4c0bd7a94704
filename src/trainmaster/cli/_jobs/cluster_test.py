"""`trainmaster cluster test`: deploy a training job on a HyperPod cluster, watch, judge and remove it."""

from __future__ import annotations

import asyncio
import json as json_
import math
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console, _home
from trainmaster.core.errors import UsageError
from trainmaster.core.results import CheckResult, Overall, exit_code, judge_overall

if TYPE_CHECKING:
    from trainmaster.targets.kubernetes.client import Client

MANIFEST = Path("FSDP/kubernetes/fsdp-hpto.yaml")
JOB_NAME = "llama3-1-8b-fsdp-hpto"
_FOLLOW_S = 1.0
_OVER = ("Succeeded", "Failed")


class Action(StrEnum):
    """What to do."""

    FULL_TEST = "full-test"
    QUICK_TEST = "quick-test"
    PERF_TEST = "perf-test"
    STATUS = "status"
    LOGS = "logs"
    MONITOR = "monitor"
    DESCRIBE = "describe"
    EVENTS = "events"
    CLEANUP = "cleanup"
    RUN = "run"
    VALIDATE_SETUP = "validate-setup"
    VALIDATE_FRAMEWORK = "validate-framework"


_Seconds = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Seconds to watch, from the first loss on.",
        show_default="60 quick, 300 full, 600 perf, or longer where plan says so; monitor: until the job is over",
    ),
]
_MONITOR_S = {Action.QUICK_TEST: 60.0, Action.FULL_TEST: 300.0, Action.PERF_TEST: 600.0}


def test(
    action: Annotated[Action, typer.Option(help="What to do.")] = Action.QUICK_TEST,
    monitor_duration: _Seconds = None,
    job_name: Annotated[str, typer.Option(help="Name of the job, and label job-name of its pods.")] = JOB_NAME,
    manifest: Annotated[
        Path, typer.Option(help="Manifest of the job; written if there is none, else taken as it is.")
    ] = MANIFEST,
    on: Annotated[str, typer.Option(help="Cluster, as hyperpod:cluster.yaml.")] = "hyperpod",
    baseline_tokens_per_s: Annotated[
        float | None, typer.Option(min=0, help="Rate to compare with.", show_default="not judged")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="With logs: go on until the job is over.")] = False,
    tail: Annotated[int, typer.Option(min=1, help="With logs: newest lines of each pod.")] = 100,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the manifest as it would be written; ask no cluster.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Test a HyperPod cluster: deploy a training job, wait for its pods, watch it, judge it, remove it.

    The job is removed whatever ends the test. After SIGKILL the next test or `--action cleanup` removes it. Only
    objects that a test has created are removed.

    Exit codes: 0 PASS, 1 FAIL, 3 INCOMPLETE (an indicator was not measured).

    [bold]Examples[/]

      trainmaster cluster test --action quick-test

      trainmaster cluster test --action full-test --monitor-duration 600 --baseline-tokens-per-s 50000

      trainmaster cluster test --action status

      trainmaster cluster test --dry-run > fsdp-hpto.yaml
    """
    from trainmaster.cluster.hyperpod import framework, objects, status
    from trainmaster.cluster.hyperpod import manifest as made
    from trainmaster.targets.kubernetes.manifests import render

    if dry_run:
        _console.out.out(made.render(made.make(job_name)), end="")
        return
    if action is Action.VALIDATE_FRAMEWORK:
        _end(framework.check_framework(Path.cwd()), json=json)
        return
    cluster = _Cluster(job_name=job_name, manifest=manifest, on=on)
    if action is Action.STATUS:
        answer = cluster.call(lambda client, space: status.read_status(client, space, job_name))
        _console.out.out(json_.dumps(answer, indent=2))
    elif action is Action.LOGS:
        cluster.call(lambda client, space: cluster.print_logs(client, space, follow=follow, tail=tail))
    elif action is Action.MONITOR:
        cluster.call(lambda client, space: cluster.monitor(client, space, seconds=monitor_duration))
    elif action is Action.DESCRIBE:
        answer = cluster.call(lambda client, space: status.describe_job(client, space, job_name))
        _console.out.out(render([answer["job"], {"pods": answer["pods"], "events": answer["events"]}]), end="")
    elif action is Action.EVENTS:
        for row in cluster.call(status.list_events):
            _console.out.out(
                f"{row['at']}  {row['type']:<8} {row['reason']:<20} {row['object']}  {row['message']} (x{row['count']})"
            )
    elif action is Action.CLEANUP:
        removed = cluster.call(lambda client, space: objects.remove(client, space, job_name))
        _console.out.print(f"removed {len(removed)} objects of {job_name}")
    elif action is Action.RUN:
        cluster.call(cluster.deploy)
        _console.out.print(f"deployed {job_name}; follow it with: make logs-follow; end it with: make stop")
    elif action is Action.VALIDATE_SETUP:
        _end(cluster.call(lambda client, space: status.check_cluster(client, space, cluster.load_objects())), json=json)
    else:
        outcome = cluster.call(
            lambda client, space: cluster.test(client, space, action, monitor_duration, baseline_tokens_per_s)
        )
        _end(outcome.results, overall=outcome.overall, json=json)


class _Cluster:
    """The cluster of one command, and the job that it is about."""

    def __init__(self, *, job_name: str, manifest: Path, on: str) -> None:
        from trainmaster.cluster.hyperpod import clock
        from trainmaster.targets.kubernetes import read_settings

        self._settings, self._job_name, self._manifest = read_settings(on), job_name, manifest
        self._clock: clock.Clock = clock.WallClock()

    def call(self, work: Callable[[Client, str], Coroutine[Any, Any, Any]]) -> Any:
        """Run with a client. Ctrl-C and SIGTERM cancel once: what was made is removed first."""
        from trainmaster.cluster.termination import until_terminated
        from trainmaster.targets.kubernetes.kubeconfig import load_access
        from trainmaster.targets.kubernetes.retrying import RetryingClient

        async def go() -> Any:
            task = asyncio.current_task()
            assert task is not None
            client = RetryingClient(load_access(self._settings.kubeconfig, self._settings.context))
            try:
                with until_terminated(task):
                    return await work(client, self._settings.namespace)
            finally:
                await client.close()

        try:
            return asyncio.run(go())
        except asyncio.CancelledError:
            raise typer.Exit(143) from None

    async def monitor(self, client: Client, namespace: str, *, seconds: float | None) -> None:
        """Print each pod when it changes: for the given time, or until the job is over or removed."""
        from trainmaster.cluster.hyperpod.status import read_status

        shown: dict[str, str] = {}
        until = self._clock.now() + seconds if seconds is not None else math.inf
        while True:
            listed = (await read_status(client, namespace, self._job_name))["pods"]
            for pod in listed:
                why = f"  {pod['why']}" if pod["why"] else ""
                text = f"{pod['phase'] or '-':<10} restarts {pod['restarts']}  {pod['node'] or '-'}{why}"
                if shown.get(pod["name"]) != text:
                    shown[pod["name"]] = text
                    _console.out.out(f"{datetime.now(UTC):%H:%M:%S}  {pod['name']:<40} {text}")
            if self._clock.now() >= until or (shown and all(pod["phase"] in _OVER for pod in listed)):
                return
            await self._clock.sleep(_FOLLOW_S)

    async def deploy(self, client: Client, namespace: str) -> None:
        """Create the job, which stays until `cleanup`."""
        from trainmaster.cluster.hyperpod import objects, run

        fitted = await run.fit_manifest(client, self.load_objects(), ends=False)
        if fitted.note:
            _console.note(fitted.note)
        made = objects.prepare(fitted.objects, namespace, objects.make_marks(self._job_name, None))
        await objects.clear_leftovers(client, namespace, self._job_name, _home.locate_default())
        await objects.create(client, made)

    async def test(
        self, client: Client, namespace: str, action: Action, seconds: float | None, baseline: float | None
    ) -> Any:
        from trainmaster.cluster.hyperpod import indicators, run

        planned = {Action.QUICK_TEST: indicators.QUICK, Action.FULL_TEST: indicators.FULL}
        monitor_s = seconds if seconds is not None else _MONITOR_S[action]
        plan = run.TestPlan(
            manifest=self.load_objects(),
            namespace=namespace,
            home=_home.locate_default(),
            planned=planned.get(action, indicators.PERFORMANCE),
            monitor_s=monitor_s,
            stretch=seconds is None,
            clock=self._clock,
            job_name=self._job_name,
            baseline_tokens_per_s=baseline,
            # A minute is looked at every 4 s, more of them every 20 s: each look reads the log of every pod.
            look_s=max(min(2.0, monitor_s / 4), min(20.0, monitor_s / 15)),
        )
        return await run.run(client, plan, _console.note)

    async def print_logs(self, client: Client, namespace: str, *, follow: bool, tail: int) -> None:
        from trainmaster.cluster.hyperpod import pods
        from trainmaster.targets.kubernetes.logs import LogReader

        readers: dict[str, LogReader] = {}
        while True:
            listed = await pods.list_pods(client, namespace, self._job_name)
            for pod in listed:
                name = str(pod["metadata"]["name"])
                first = name not in readers
                reader = readers.setdefault(name, LogReader(client, namespace, pod))
                async for line in pods.read_text(reader, tail=tail if first else None):
                    _console.out.out(f"[{name}] {line}")
            if not readers and not follow:
                raise UsageError(f"no pod of {self._job_name} in namespace {namespace}")
            if not follow or (readers and all((pod.get("status") or {}).get("phase") in _OVER for pod in listed)):
                return
            await self._clock.sleep(_FOLLOW_S)

    def load_objects(self) -> list[dict[str, Any]]:
        """Objects of the manifest; the file is written where there is none."""
        from trainmaster.cli._documents.manifest_file import load
        from trainmaster.cluster.hyperpod import manifest as made

        if not self._manifest.exists():
            self._manifest.parent.mkdir(parents=True, exist_ok=True)
            self._manifest.write_text(made.render(made.make(self._job_name)))
            _console.note(f"wrote {self._manifest}")
        return load(self._manifest)


def _end(results: list[CheckResult], *, overall: Overall | None = None, json: bool) -> None:
    """Print the verdicts and exit by them."""
    overall = overall or judge_overall(results, planned=[result.check for result in results])
    rows = [(result.check, result.verdict.value, finding) for result in results for finding in result.findings]
    if json:
        plain = [
            {
                "indicator": name,
                "verdict": word,
                "reason": finding.reason,
                "action": finding.action,
                "values": dict(finding.values),
            }
            for name, word, finding in rows
        ]
        _console.out.out(json_.dumps({"overall": overall.value, "indicators": plain}, indent=2))
    else:
        for name, word, finding in rows:
            hint = f"\n{'':26}{finding.action}" if finding.action else ""
            _console.out.out(
                f"{'NOT MEASURED' if word == 'error' else word.upper():<13}{name:<17} {finding.reason}{hint}"
            )
        _console.out.out(overall.value)
    if code := exit_code(overall):
        raise typer.Exit(code)

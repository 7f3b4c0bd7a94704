"""The thread that makes instances real: it starts and ends their processes by their timelines, and injects faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainmaster.core.errors import TrainmasterError
from trainmaster.sim.lambda_cloud.cloud import Cloud
from trainmaster.sim.lambda_cloud.gpu_answers import make_gpus
from trainmaster.sim.lambda_cloud.instance import Instance
from trainmaster.sim.lambda_cloud.machine import Machine, Programs

_TICK_S = 0.01
_WORKERS = 8


class Fleet:
    """Machines of all instances, below `folder`."""

    def __init__(
        self, cloud: Cloud, *, folder: Path, programs: Programs, ssh_port: int, cache: Path | None = None
    ) -> None:
        self._cache = cache
        self._cloud, self._folder, self._programs, self._ssh_port = cloud, folder, programs, ssh_port
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="sim-machine")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sim-fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every process of every instance."""
        self._stop.set()
        self._thread.join()
        self._pool.shutdown(wait=True)  # what is being started gets its end below
        machines = [instance.machine for instance in self._cloud.instances.values() if instance.machine is not None]
        with ThreadPoolExecutor(_WORKERS) as pool:
            list(pool.map(Machine.remove, machines))

    def inject(self, instance: Instance, fault: str) -> None:
        """Let a fault happen to an instance now."""
        cloud = self._cloud
        with cloud.lock:
            machine = instance.machine
            instance.injected.append(fault)
            match fault:
                case "preempted":
                    cloud.preempt(instance)
                case "terminated":
                    cloud.end(instance, by="fault")
                case "unhealthy":
                    instance.unhealthy = True
                case "cuda-broken":
                    cloud.break_hardware(instance.hardware)
        if fault == "cuda-broken" and machine is not None:
            machine.break_cuda()
        if fault == "link-cut" and machine is not None:
            machine.cut_links()

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            self._tick()

    def _tick(self) -> None:
        cloud = self._cloud
        due: list[tuple[Instance, str]] = []
        with cloud.lock:
            now = cloud.clock.now_s()
            for instance in cloud.instances.values():
                if instance.terminated_at is not None:
                    continue
                while instance.planned and instance.planned[0][0] <= now:
                    due.append((instance, instance.planned.pop(0)[1]))
                self._advance(instance, now)
        for instance, fault in due:
            if not instance.is_ending:
                self.inject(instance, fault)

    def _advance(self, instance: Instance, now: float) -> None:
        """Next step of one instance's processes, and its end once they are gone."""
        if instance.is_ending and instance.processes in ("off", "ready"):
            self._submit(instance, "stopping", self._remove)
        elif instance.restarting and instance.processes == "ready":
            self._submit(instance, "stopping", self._halt)
        elif instance.processes == "off" and instance.wants_processes(now) and instance.wrong is None:
            self._submit(instance, "starting", self._boot)
        began = instance.terminate_at
        if began is not None and instance.processes == "gone" and now >= began + self._cloud.settings.terminate_s:
            instance.terminated_at = now

    def _submit(self, instance: Instance, state: str, work: Callable[[Instance], None]) -> None:
        instance.processes = state  # type: ignore[assignment]
        self._pool.submit(work, instance)

    def _boot(self, instance: Instance) -> None:
        """In the pool: write the files on the first boot, start sshd."""
        cloud = self._cloud
        try:
            if instance.machine is None:
                machine = Machine(
                    self._folder / instance.id, programs=self._programs, address=instance.address, port=self._ssh_port,
                    hostname=instance.hostname, cache=self._cache,
                )  # fmt: skip
                instance.machine = machine
                rows = [
                    cloud.file_systems.find(region=instance.region, file_system_id=m["file_system_id"])
                    for m in instance.mounts
                ]
                machine.prepare(
                    public_keys=instance.public_keys,
                    gpus=make_gpus(instance.type.gpu, instance.type.gpus, instance.hardware),
                    mounts=[(row["name"], cloud.file_systems.folder(row)) for row in rows],
                )
                if cloud.is_broken(instance.hardware):
                    machine.break_cuda()
            instance.machine.start()
        except (TrainmasterError, OSError) as error:
            with cloud.lock:
                instance.wrong, instance.processes = str(error), "off"
            return
        with cloud.lock:
            instance.processes = "ready"

    def _halt(self, instance: Instance) -> None:
        """In the pool: end the processes for a restart."""
        assert instance.machine is not None
        instance.machine.stop()
        with self._cloud.lock:
            instance.restarting, instance.processes = False, "off"

    def _remove(self, instance: Instance) -> None:
        """In the pool: end the processes and delete the files."""
        if instance.machine is not None:
            instance.machine.remove()
            self._cloud.release_address(instance.address)
        with self._cloud.lock:
            instance.processes = "gone"

"""Container workload: log in, pull, and the script that runs one rank in a container; nothing of it stays behind.

    WORK/scripts/run_docker_job.sh     written here; runs the container of one rank in the foreground of the agent
    WORK/data  configs  scripts        there for the program; WORK/global.json is read as its event file

The password comes from a file of the attempt's secrets folder, which is removed when it is read, or from the agent's
environment. It goes to `login` by standard input; the credentials of the login lie in the attempt's folder until the
pull is done, and nowhere else. Variables reach the container by name (`--env RANK`): no value is in a command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainmaster.agent.diagnose import Outcome
from trainmaster.agent.folder import AttemptFolder
from trainmaster.agent.watch import Stop, Watch
from trainmaster.core.container import FOLDERS, RUN_SCRIPT, SECRETS_FOLDER, Container
from trainmaster.core.plan import Plan
from trainmaster.core.states import Reason

_AUTH_FOLDER = "registry"  # in the attempt's folder, while the image is pulled
_ENGINE_LOG = "engine.log"  # in the attempt's folder, while the engine logs in or pulls
_REMOVE_S = 60.0
_SHOWN_CHARACTERS = 300
_NVIDIA = Path("/dev/nvidiactl")
_ENGINE_FAILED = 125  # exit code of `docker run` where the engine itself failed
# Variables of the agent that mean nothing, or something else, inside an image.
_NOT_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|TERM|TMPDIR|HOSTNAME|VIRTUAL_ENV|CONDA_.*|LD_.*|PYTHONPATH|PYTHONHOME|"
    r"PYTHONSAFEPATH|SSH_.*|XDG_.*|DOCKER_.*|REGISTRY_AUTH_FILE|CONTAINERS?_.*|SSL_CERT_.*|REQUESTS_CA_BUNDLE|_"
)


class _Stopped(Exception):
    """A stop was requested during the preparation."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.message)
        self.stop = stop


class _Failed(Exception):
    """The engine refused."""


def prepare(plan: Plan, folder: AttemptFolder, work: Path, watch: Watch) -> Outcome | None:
    """Log in and pull; None where ranks may start, else the outcome of the attempt."""
    container = _container(plan)
    try:
        for name in FOLDERS:
            (work / name).mkdir(parents=True, exist_ok=True)
        engine, auth = find_engine(container), folder.path / _AUTH_FOLDER
        environment = {**os.environ, "DOCKER_CONFIG": str(auth), "REGISTRY_AUTH_FILE": str(auth / "auth.json")}
        auth.mkdir(mode=0o700, exist_ok=True)
        (auth / "auth.json").write_text("{}")
        try:
            password = _log_in(engine, container, folder, environment, watch)
            if container.pull == "always" or not _has_image(engine, container, environment):
                folder.log(f"pulling {container.image} with {engine}")
                _call([engine, "pull", container.image], environment, folder, watch, hide=password)
        finally:
            _drop_secrets(folder.path)
    except _Stopped as asked:
        return Outcome(reason=asked.stop.reason, message=f"{asked.stop.message}; stopped before the start")
    except _Failed as error:
        return Outcome(reason=Reason.IMAGE_ERROR, message=str(error))
    except OSError as error:
        return Outcome(reason=Reason.TARGET_ERROR, message=f"the container could not be prepared: {error}")
    return None


def write_script(plan: Plan, work: Path, environment: Mapping[str, str]) -> Path:
    """Write the script that runs one rank's container; the rank is a variable."""
    container = _container(plan)
    engine = find_engine(container)
    words = [engine, "run", "--network", "host", "--ipc", "host"]
    words += ["--label", f"trainmaster.attempt={plan.mark}", "--workdir", str(work)]
    for place in sorted({str(work), plan.folder, plan.checkpoints}):
        words += ["--volume", f"{place}:{place}"]
    for name in sorted({*environment, "RANK", "LOCAL_RANK", "ROLE_RANK", "WANDB_RUN_ID", "WANDB_RESUME"}):
        if not _NOT_PASSED.fullmatch(name) or name in plan.spec.env:
            words += ["--env", name]
    if container.gpus == "all" or (container.gpus == "auto" and _NVIDIA.exists()):
        words += _gpu_words(engine, plan.gpus)
    words += [*container.options]
    script, program = work / RUN_SCRIPT, [container.image, *(plan.spec.command or ())]
    lines = [
        "#!/bin/sh",
        f"# Runs {container.image} for one rank of attempt {plan.attempt}; written by trainmaster at its start.",
        f'exec {shlex.join(words)} --name "{_name(plan)}-$RANK" {shlex.join(program)}',
    ]
    script.parent.mkdir(parents=True, exist_ok=True)
    script.unlink(missing_ok=True)  # never through a link that a program left here
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    return script


def _gpu_words(engine: str, gpus: Sequence[str]) -> list[str]:
    """Options for these GPUs; for all of the node where none is assigned."""
    if engine == "docker":
        # Quoted for docker's own parser of comma-separated values.
        return ["--gpus", f'"device={",".join(gpus)}"' if gpus else "all"]
    return [word for gpu in gpus or ("all",) for word in ("--device", f"nvidia.com/gpu={gpu}")]


def remove(plan: Plan) -> None:
    """Remove the containers of the attempt on this node, by force. They do not end with the program that ran them.

    Its secrets and its login too, should the agent have been killed before it removed them.
    """
    container = plan.spec.container
    if container is None:
        return
    _drop_secrets(Path(plan.folder))
    for engine in ("docker", "podman") if container.engine == "auto" else (container.engine,):
        if shutil.which(engine) is None:
            continue
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [engine, "ps", "--all", "--quiet", "--filter", f"label=trainmaster.attempt={plan.mark}"]
            listed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_REMOVE_S)
            if ids := listed.stdout.split():
                command = [engine, "rm", "--force", *ids]
                subprocess.run(command, check=False, capture_output=True, timeout=_REMOVE_S)


def explain(outcome: Outcome) -> Outcome:
    """An outcome whose exit code came from the engine and not from the program."""
    if outcome.evidence.get("exit_code") != _ENGINE_FAILED:
        return outcome
    lines = [line for line in outcome.evidence.get("last_lines", []) if line.strip()]
    last = lines[-1][:_SHOWN_CHARACTERS] if lines else "it printed nothing"
    return Outcome(reason=Reason.IMAGE_ERROR, message=f"the container did not start: {last}", evidence=outcome.evidence)


def find_engine(container: Container) -> str:
    """The engine on this node; _Failed where there is none."""
    wanted = ("docker", "podman") if container.engine == "auto" else (container.engine,)
    for name in wanted:
        if shutil.which(name) is not None:
            return name
    raise _Failed(f"no {' or '.join(wanted)} on this node; install one, or leave `container` out of the spec")


def _container(plan: Plan) -> Container:
    assert plan.spec.container is not None, "asked for the container of a job that has none"
    return plan.spec.container


def _name(plan: Plan) -> str:
    return "trainmaster-" + re.sub(r"[^A-Za-z0-9]", "-", plan.mark)


def _log_in(
    engine: str, container: Container, folder: AttemptFolder, environment: Mapping[str, str], watch: Watch
) -> str:
    """Log in where the spec says so; the password."""
    login = container.login
    if login is None:
        return ""
    file = folder.path / SECRETS_FOLDER / login.password_from
    try:
        password = file.read_text()
    except FileNotFoundError:
        password = os.environ.get(login.password_from, "")
    if not password:
        raise _Failed(
            f"no password for {container.registry}: set {login.password_from} in the environment of the server and "
            "name it in TRAINMASTER_JOB_ENV"
        )
    words = [engine, "login", "--username", login.user, "--password-stdin", container.registry]
    _call(words, environment, folder, watch, stdin=password, hide=password)
    return password


def _has_image(engine: str, container: Container, environment: Mapping[str, str]) -> bool:
    words = [engine, "image", "inspect", container.image]
    return subprocess.run(words, check=False, capture_output=True, env=environment).returncode == 0


def _call(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: AttemptFolder,
    watch: Watch,
    *,
    stdin: str = "",
    hide: str = "",
) -> None:
    """Run the engine to its end; its output goes to agent.log, without the text to hide, which a registry may repeat.

    _Failed with its last line, _Stopped on request.
    """
    output = folder.path / _ENGINE_LOG
    with output.open("w+") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
            process.stdin.close()
        while process.poll() is None:
            if (stop := watch.asked()) is not None:
                process.kill()
                process.wait()
                raise _Stopped(stop)
            watch.beat(ranks=0)
            watch.sleep()
        log.seek(0)
        text = _hidden(log.read(), hide)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    output.unlink()
    what = f"{words[0]} {words[1]}"
    for line in lines[-20:]:
        folder.log(f"{what}: {line[:_SHOWN_CHARACTERS]}")
    if process.returncode != 0:
        last = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "it printed nothing")
        raise _Failed(f"{what} {words[-1]} ended with {process.returncode}: {last[:_SHOWN_CHARACTERS]}")


def _hidden(text: str, password: str) -> str:
    for word in filter(None, (password, password.strip())):
        text = text.replace(word, "[password]")
    return text


def _drop_secrets(folder: Path) -> None:
    """Remove the password, the login, and the output of an engine that was cut off."""
    for name in (SECRETS_FOLDER, _AUTH_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / _ENGINE_LOG).unlink()

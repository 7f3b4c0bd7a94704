"""First program of a SageMaker container: unpack trainmaster's node half, find this host's rank, start the agent.

It is a file of the input channel and runs by its path; it imports nothing of trainmaster. The root folder is an
argument in tests. Outputs are moved to /opt/ml/output/data, which SageMaker copies to S3.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path


def main(root: Path) -> int:
    """Run this host's share of the attempt; returns the exit code."""
    given, run = root / "input" / "data" / "trainmaster", root / "trainmaster"
    index, nodes, named = _find_host(root / "input" / "config" / "resourceconfig.json")
    plan = json.loads((given / "plan.json").read_text())
    plan["folder"] = str(run / "attempts" / "1")
    plan["checkpoints"] = str(root / "checkpoints")
    if len(nodes) > 1:
        plan["master_addr"] = nodes[0]
    run.mkdir(parents=True, exist_ok=True)
    (run / "plan").mkdir(exist_ok=True)
    (run / "plan" / "plan.json").write_text(json.dumps(plan))
    if (given / "work.tar.gz").exists():
        shutil.copyfile(given / "work.tar.gz", run / "plan" / "work.tar.gz")
    env = {**named, **os.environ, "JOB_COMPLETION_INDEX": str(index), **_read_secrets(given / "secrets.json")}
    if (given / "package.zip.gz").exists():
        with gzip.open(given / "package.zip.gz") as packed, zipfile.ZipFile(io.BytesIO(packed.read())) as archive:
            archive.extractall(run / "package")  # data files of the package are read by path
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(run / "package"), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "trainmaster.agent.pod", str(run / "plan" / "plan.json")]
    child = subprocess.Popen(command, env=env)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: child.send_signal(got))
    code = child.wait()
    _keep_outputs(run / "attempts", root / "output" / "data" / f"node-{index}")
    return code


def _find_host(path: Path) -> tuple[int, list[str], dict[str, str]]:
    """Rank of this host, all hosts, and the variables that the Training Toolkit would make of SageMaker's file."""
    config = json.loads(path.read_text())
    hosts = sorted(config["hosts"], key=lambda name: (len(name), name))  # algo-2 is before algo-10
    named = {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": config["current_host"]}
    if config.get("current_instance_type"):
        named["SM_CURRENT_INSTANCE_TYPE"] = config["current_instance_type"]
    return hosts.index(config["current_host"]), hosts, named


def _read_secrets(path: Path) -> dict[str, str]:
    """Values from AWS Secrets Manager, read with the role of the job."""
    named = json.loads(path.read_text())
    if not named["secrets"]:
        return {}
    import boto3  # type: ignore[import-untyped]

    client = boto3.client("secretsmanager", region_name=named["region"])
    return {name: client.get_secret_value(SecretId=which)["SecretString"] for name, which in named["secrets"].items()}


def _keep_outputs(attempts: Path, to: Path) -> None:
    for folder in sorted(attempts.glob("*/outputs")):
        if any(folder.iterdir()):
            shutil.copytree(folder, to, symlinks=True, ignore=_find_special, dirs_exist_ok=True)


def _find_special(folder: str, names: list[str]) -> list[str]:
    """Links, pipes, sockets and devices: the agent names them, and a copy of one would fail or lead elsewhere."""
    modes = {name: (Path(folder) / name).lstat().st_mode for name in names}
    return [name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "/opt/ml")))

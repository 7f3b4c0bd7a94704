"""Objects of an attempt in S3: inputs that its containers read, outputs that SageMaker leaves there."""

from __future__ import annotations

import asyncio
import io
import re
import tarfile
from pathlib import Path

from trainmaster.core.errors import TargetError
from trainmaster.core.plan import OUTPUTS_FOLDER
from trainmaster.targets import FileSize, Submission
from trainmaster.targets.kubernetes.planning import package
from trainmaster.targets.sagemaker.aws import Aws
from trainmaster.targets.sagemaker.settings import Settings

_PIECE_BYTES = 8 << 20
_OUTPUT = re.compile(r"(?:.*/)?data/node-([0-9]{1,5})/(.+)", re.DOTALL)


def split(uri: str) -> tuple[str, str]:
    """Bucket and key of an address."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


async def upload(aws: Aws, submission: Submission, settings: Settings, folder: str) -> None:
    """Write the objects of the input channel; writing them again changes nothing."""
    objects: dict[str, bytes] = {
        uri: text.encode() for uri, text in submission.files.items() if uri.startswith("s3://")
    }
    if settings.start == "agent" and settings.package == "send":
        objects[f"{folder}/package.zip.gz"] = package().data
    archive = "work.tar.gz" if settings.start == "agent" else "sourcedir.tar.gz"
    if submission.work is not None:
        objects[f"{folder}/{archive}"] = await asyncio.to_thread(_pack, submission.work)
    for uri, data in objects.items():
        bucket, key = split(uri)
        await aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=data)


async def remove(aws: Aws, folder: str) -> None:
    """Delete the inputs of an attempt."""
    bucket, prefix = split(folder)
    for key, _ in await list_objects(aws, bucket, f"{prefix}/"):
        await aws.call("s3", "delete_object", Bucket=bucket, Key=key)


async def list_outputs(aws: Aws, uri: str) -> list[tuple[int, FileSize, str]]:
    """Outputs of a training job: node, file, and key in the bucket."""
    bucket, prefix = split(uri)
    outputs = []
    for key, size in await list_objects(aws, bucket, f"{prefix}/"):
        if match := _OUTPUT.fullmatch(key.removeprefix(f"{prefix}/")):
            outputs.append((int(match[1]), FileSize(name=f"{OUTPUTS_FOLDER}/{match[2]}", size_bytes=size), key))
    return outputs


async def read_object(aws: Aws, bucket: str, key: str, size: int, *, offset: int, limit: int) -> bytes:
    """At most `limit` bytes of an object from `offset`."""
    if offset >= size or limit == 0:
        return b""
    end = min(offset + limit, size) - 1
    answer = await aws.call("s3", "get_object", Bucket=bucket, Key=key, Range=f"bytes={offset}-{end}")
    return bytes(answer["Body"])


async def read_whole(aws: Aws, bucket: str, key: str, size: int) -> bytes:
    """All bytes of an object, piece by piece, each once. TargetError where it has become shorter meanwhile."""
    data = bytearray()
    while len(data) < size:
        piece = await read_object(aws, bucket, key, size, offset=len(data), limit=_PIECE_BYTES)
        if not piece:
            raise TargetError(f"s3://{bucket}/{key} ends after {len(data)} of {size} bytes")
        data += piece
    return bytes(data)


async def list_objects(aws: Aws, bucket: str, prefix: str) -> list[tuple[str, int]]:
    """Keys below a prefix, with their sizes."""
    objects: list[tuple[str, int]] = []
    more: dict[str, str] = {}
    while True:
        page = await aws.call("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        objects += [(str(item["Key"]), int(item["Size"])) for item in page.get("Contents") or ()]
        if not page.get("IsTruncated"):
            return objects
        more = {"ContinuationToken": page["NextContinuationToken"]}


def _pack(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()

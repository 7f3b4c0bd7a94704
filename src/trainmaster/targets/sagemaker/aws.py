"""The AWS APIs of one account and region: SageMaker, CloudWatch Logs, S3. Errors are ours.

boto3 blocks, so each call runs in a thread. Requests are not repeated here: the caller decides whether that is safe.
"""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

from trainmaster.core.errors import MissingExtra, NoAccess, NoCapacity, TargetError, Unreachable

# ResourceLimitExceeded is an error of CreateTrainingJob in botocore's service model, and a quota by its text:
# "The account-level service limit 'ml.p3.2xlarge for training job usage' is 0 Instances, with current utilization of 0
# Instances and a request delta of 1 Instances." (gabehollombe-aws/jupyter-notebooks#1). The others are unverified.
_CAPACITY = ("ResourceLimitExceeded", "CapacityError", "InsufficientCapacityError", "InsufficientInstanceCapacity")
_LATER = (
    "ThrottlingException", "Throttling", "ThrottledException", "RequestThrottled", "RequestThrottledException",
    "ProvisionedThroughputExceededException", "PriorRequestNotComplete", "TooManyRequestsException",
    "RequestLimitExceeded", "SlowDown", "ServiceUnavailable", "InternalFailure", "InternalError",
    "InternalServerError", "RequestTimeout",
)  # fmt: skip
_EXPIRED = ("ExpiredTokenException", "ExpiredToken", "RequestExpired")
_ABSENT = ("ResourceNotFound", "ResourceNotFoundException", "NoSuchKey", "404")


_QUOTA = re.compile(r" is (\d{1,9}) Instances\b.*\brequest delta of (\d{1,9}) Instances\b", re.DOTALL)


class Missing(TargetError):
    """It is certain that there is no such job, log or object."""


class Taken(TargetError):
    """A training job of this name exists."""


class Aws:
    """Clients of one region."""

    def __init__(self, region: str, endpoint: str | None) -> None:
        self._region, self._endpoint = region, endpoint
        self._clients: dict[str, Any] = {}

    async def call(self, service: str, operation: str, **given: Any) -> dict[str, Any]:
        """Answer of one request. Unreachable: the outcome is unknown. Every other error: nothing was done."""
        return await asyncio.to_thread(self._call, service, operation, given)

    def _call(self, service: str, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        from botocore import exceptions  # type: ignore[import-untyped]

        try:
            answer: dict[str, Any] = getattr(self._client(service), operation)(**given)
            if service == "s3" and "Body" in answer:
                answer["Body"] = answer["Body"].read()
            return answer
        except exceptions.ClientError as error:
            if error.response["Error"].get("Code") in _EXPIRED:
                self._clients.clear()  # the next request reads the credentials of this machine again
            raise translate(operation, error.response) from None
        except exceptions.ParamValidationError as error:
            raise TargetError(f"sagemaker: {operation}: {error}") from None
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
            raise NoAccess(f"sagemaker: {error}; set AWS_PROFILE, or give this machine a role") from None
        except (exceptions.BotoCoreError, OSError) as error:
            raise Unreachable(f"sagemaker: {operation}: no answer: {error}") from None

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            try:
                import boto3  # type: ignore[import-untyped]
                from botocore.config import Config  # type: ignore[import-untyped]
            except ImportError:
                raise MissingExtra("SageMaker", "aws") from None
            once = Config(retries={"total_max_attempts": 1}, connect_timeout=10, read_timeout=30)
            session = boto3.session.Session()  # the default session is not safe to share between threads
            made = session.client(service, region_name=self._region, endpoint_url=self._endpoint, config=once)
            self._clients.setdefault(service, made)
        return self._clients[service]


def translate(operation: str, answer: Any) -> TargetError:
    """A refusal of AWS as an error of ours."""
    code, text = str(answer["Error"].get("Code", "")), str(answer["Error"].get("Message", ""))
    status = int((answer.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
    message = f"sagemaker: {operation}: {code}: {text}"
    if code in _CAPACITY:
        quota = _QUOTA.search(text)
        if quota is not None and int(quota[2]) > int(quota[1]):  # never enough, however long it waits
            return TargetError(f"{message}; request a higher quota of the account")
        return NoCapacity(message)
    # DescribeTrainingJob has no code of its own for a job that does not exist: "Requested resource not found."
    vague = code == "ValidationException" and ("not found" in text.lower() or "could not find" in text.lower())
    if code in _ABSENT or vague:
        return Missing(message)
    if code == "ResourceInUse":
        return Taken(message)
    if code in _EXPIRED:
        return Unreachable(f"{message}; renew the AWS credentials of this server")
    if code in _LATER or status >= 500:
        return Unreachable(message)
    if code in ("AccessDeniedException", "AccessDenied"):
        return TargetError(f"{message}; the account of this server lacks this right")
    return TargetError(message)


@functools.lru_cache(maxsize=64)
def open_aws(region: str, endpoint: str | None) -> Aws:
    """Clients of a region, shared by all attempts."""
    return Aws(region, endpoint)

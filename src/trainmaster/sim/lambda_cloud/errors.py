"""Refusals of the API: an HTTP status and the vendor's error code."""

from __future__ import annotations


class ApiError(Exception):
    """A refusal. The schema requires a suggestion with some codes, so every refusal has one."""

    def __init__(self, status: int, code: str, message: str, suggestion: str = "Correct the request.") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.suggestion = status, code, message, suggestion

    def body(self) -> dict[str, object]:
        return {"error": {"code": self.code, "message": self.message, "suggestion": self.suggestion}}


def invalid(message: str) -> ApiError:
    return ApiError(400, "global/invalid-parameters", message)


def missing(what: str) -> ApiError:
    return ApiError(404, "global/object-does-not-exist", f"{what} does not exist.", "Check the name or ID.")


def no_capacity(type_name: str, region: str) -> ApiError:
    code = "instance-operations/launch/insufficient-capacity"
    return ApiError(400, code, f"Not enough capacity for {type_name} in {region}.", "Try another type or region.")

"""Errors in the form that clients of OpenAI's API read, and JSON over HTTP."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """An error that a client receives in place of an answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status = status  # the HTTP status
        self.message = message  # one line
        self.param = param  # the field at fault, or None
        self.code = code  # a word for programs, or None
        self.retry_after_s = retry_after_s  # seconds after which a retry may succeed, or None

    def body(self) -> dict[str, Any]:
        """JSON object of the error."""
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def _headers(self) -> dict[str, str]:
        """HTTP headers beside the body."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def unavailable(message: str) -> ApiError:
    """Error of a server that is loading or ending."""
    return ApiError(message, status=503, code="unavailable", retry_after_s=5)


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response in ASCII: texts of clients may hold what UTF-8 has no bytes for."""
    text = json.dumps(body, allow_nan=False)
    return Response(text, status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    """Response that reports an error."""
    return json_response(error.body(), error.status, error._headers())


def raw_error(error: ApiError) -> bytes:
    """An error as the bytes of a whole HTTP/1.1 response, after which the connection closes."""
    body = json.dumps(error.body()).encode()
    headers = {
        "content-type": "application/json", "content-length": str(len(body)),
        "connection": "close", **error._headers(),
    }  # fmt: skip
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name.lower()}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body

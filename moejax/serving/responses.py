"""JSON answers over HTTP, errors among them."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from moejax.serving.errors import ApiError


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response in ASCII: texts of clients may hold what UTF-8 has no bytes for."""
    text = json.dumps(body, allow_nan=False)
    return Response(text, status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    """Response that reports an error."""
    return json_response(error.body(), error.status, error.headers())


def raw_error(error: ApiError) -> bytes:
    """An error as the bytes of a whole HTTP/1.1 response, after which the connection closes."""
    body = json.dumps(error.body()).encode()
    headers = {
        "content-type": "application/json", "content-length": str(len(body)),
        "connection": "close", **error.headers(),
    }  # fmt: skip
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name.lower()}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body

"""Guards against requests by other hosts, other pages, or without the key."""

import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moejax.serving.errors import ApiError, error_response

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/health",)  # a load balancer asks them without a key
ANY = "*"
_OR_THE_KEY = ", the API key opens to all"


class HostGuard:
    """Refuses requests by names that are not the server's, and those of two lengths.

    A page of another site can have its name resolve to this machine (DNS rebinding); the browser
    then takes the server for part of that site, and its name is in `Host`. A request with
    `Content-Length` beside `Transfer-Encoding` ends at different bytes for a proxy and for us.

    Whoever gives the API key may call the server by any name: pages of other sites have it not.
    """

    def __init__(
        self, app: ASGIApp, *, bound_to: str, allowed: Collection[str] = (), key: str = ""
    ):
        """Wraps an application.

        Args:
          bound_to: the address or name that the server listens on.
          allowed: further names; `*` is any.
          key: the API key; "" for none.
        """
        self._app = app
        self._key = key
        self._names = {name.lower().strip("[]") for name in (*LOCAL_HOSTS, bound_to, *allowed)}
        address = _address(bound_to)
        self._is_on_all = address is not None and address.is_unspecified

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or hands the request on."""
        headers = Headers(scope=scope)
        refused = None
        if "content-length" in headers and "transfer-encoding" in headers:
            refused = ApiError(
                "give Content-Length or Transfer-Encoding, not both", code="invalid_http"
            )
        elif (
            (host := headers.get("host"))
            and not self._is_ours(_name_of(host))
            and not _has_key(headers, self._key)
        ):
            refused = ApiError(
                f"the host {host[:100]!r} is not one of this server's; --config.allowed_hosts "
                f"takes more{_OR_THE_KEY * bool(self._key)}",
                status=403, code="host_not_allowed",
            )  # fmt: skip
        if refused is None:
            await self._app(scope, receive, send)
            return
        response = error_response(refused)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _is_ours(self, name: str) -> bool:
        if name in self._names or name.endswith(".localhost") or ANY in self._names:
            return True
        return self._is_on_all and _address(name) is not None


class AccessGuard:
    """Refuses requests without the key; where there is none, those of pages of other origins.

    A page has an origin that it cannot choose; the key is what other pages cannot know.
    """

    def __init__(self, app: ASGIApp, *, key: str = "", origins: Collection[str] = ()):
        """Wraps an application.

        Args:
          key: what clients give as `Authorization: Bearer`; "" asks for none.
          origins: origins of pages that may send requests; `*` is any.
        """
        self._app = app
        self._key = key
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or hands the request on."""
        headers = Headers(scope=scope)
        response = None
        origin = headers.get("origin")
        if _has_key(headers, self._key):
            pass
        elif origin is not None and not self._may_ask(origin.lower(), headers.get("host", "")):
            said = f"pages of {origin[:100]!r} may not ask; --config.cors_origins takes them"
            said += _OR_THE_KEY * bool(self._key)
            response = error_response(ApiError(said, status=403, code="origin_not_allowed"))
        elif self._key and scope["path"] not in OPEN_PATHS:
            said = "the API key is missing or wrong: Authorization: Bearer KEY"
            response = error_response(ApiError(said, status=401, code="invalid_api_key"))
            response.headers["www-authenticate"] = "Bearer"
        await (response or self._app)(scope, receive, send)

    def _may_ask(self, origin: str, host: str) -> bool:
        is_own = origin in (f"http://{host.lower()}", f"https://{host.lower()}")
        return is_own or origin in self._origins or ANY in self._origins


def _has_key(headers: Headers, key: str) -> bool:
    """Whether a request gives the API key; False where there is none ("")."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    is_same = hmac.compare_digest(given.strip().encode(), key.encode())
    return bool(key) and kind.lower() == "bearer" and is_same


def _name_of(host: str) -> str:
    """The name or address in a Host header, without its port, in small letters."""
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None

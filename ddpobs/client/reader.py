"""Requests for the collector's JSON documents and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit, urlunsplit

import httpcore

from ddpobs.config import TelemetryConfig
from ddpobs.errors import CollectorError
from ddpobs.export.http_sender import NETWORK_ERRORS, request_headers
from ddpobs.wire import printable

_EXCERPT_CHARACTERS = 300
_UNKNOWN_RUN = "Unknown run"
"""Title of the collector's problem document about a run that it does not have."""


class Reply(NamedTuple):
    """A reply's bytes, and the JSON document that they encode."""

    body: bytes
    document: Any


def read(
    config: TelemetryConfig, path: str, query: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> Reply:
    """Read a JSON document.

    Args:
        config: Address, token and the default of the timeout.
        path: Path below `/api/v1`.
        query: Query parameters.
        timeout_s: Longest wait for a connection, and for each piece of the response.

    Raises:
        CollectorError: The collector is not reachable, refuses, or another server responded.
    """
    url, body = _request(config, path, query, timeout_s)
    try:
        return Reply(body, json.loads(body))
    except ValueError:
        raise CollectorError(f"{url}: not a collector's reply: {_excerpt(body)}", url) from None


def read_file(config: TelemetryConfig, path: str, query: Mapping[str, str] | None = None) -> bytes:
    """Read a file; arguments and errors as for `read`."""
    return _request(config, path, query, None)[1]


def change(config: TelemetryConfig, path: str, values: Mapping[str, Any]) -> None:
    """Replace fields of a run; errors as for `read`.

    Args:
        config: Address and token.
        path: Path below `/api/v1`.
        values: New values by the name of the field.
    """
    _request(config, path, None, None, json.dumps(values).encode())


def send(config: TelemetryConfig, path: str, values: Mapping[str, Any]) -> Any:
    """Send a JSON document that the collector stores; return its reply's document. Errors as for `read`."""
    url, body = _request(config, path, None, None, json.dumps(values).encode(), method="POST")
    try:
        return json.loads(body)
    except ValueError:
        raise CollectorError(f"{url}: not a collector's reply: {_excerpt(body)}", url) from None


def page_address(collector: str, run: str) -> str:
    """Address of a run's page, without a password that the collector's address may contain."""
    parts = urlsplit(collector.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], f"{parts.path}/runs/{run}", "", ""))


def _request(
    config: TelemetryConfig,
    path: str,
    query: Mapping[str, str] | None,
    timeout_s: float | None,
    content: bytes | None = None,
    *,
    method: str = "PATCH",
) -> tuple[str, bytes]:
    """Request a document, or send content to it by a method; return its address and the response's bytes.

    Certificates are those of the system and of SSL_CERT_FILE, as for batches. Proxies in the environment are ignored.
    """
    url = f"{config.collector.rstrip('/')}/api/v1{path}"
    limit_s = config.timeout_s if timeout_s is None else timeout_s
    limits = dict.fromkeys(("connect", "read", "write", "pool"), limit_s)
    try:
        target = f"{url}?{urlencode(query)}" if query else url
        method = "GET" if content is None else method
        headers = request_headers(config)
        response = httpcore.request(method, target, headers=headers, content=content, extensions={"timeout": limits})
    except (*NETWORK_ERRORS, OSError, ValueError) as error:
        advice = "is this the collector? --collector or DDPOBS_TELEMETRY names it"
        raise CollectorError(f"{url}: {error}: {advice}", url) from error
    if not 200 <= response.status < 300:
        text, title = _problem(response.status, response.content)
        place = config.collector if title == _UNKNOWN_RUN else f"{url}: HTTP {response.status}"
        raise CollectorError(f"{place}: {text}", url, response.status)
    return url, response.content


def _problem(status: int, body: bytes) -> tuple[str, str]:
    """Describe a refusal: by the collector's problem document and its title, or by the start of a proxy's own page."""
    title = ""
    try:
        problem = json.loads(body)
        title, detail = str(problem["title"]), printable(str(problem["detail"]))
        text = f"{detail}; `ddpobs list` lists the runs" if title == _UNKNOWN_RUN else f"{printable(title)}: {detail}"
    except (ValueError, KeyError, TypeError):
        text = _excerpt(body)
    return text + (": set DDPOBS_TOKEN" if status == HTTPStatus.UNAUTHORIZED else ""), title


def _excerpt(body: bytes) -> str:
    return printable(body.decode(errors="replace")[:_EXCERPT_CHARACTERS])

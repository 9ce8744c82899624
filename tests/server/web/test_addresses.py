"""Addresses of the collector: IPv4 and IPv6 at once, a path of a proxy, and connections that stay open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from ddpobs_server.settings import Settings
from ddpobs_server.web import bounded_protocol, listening
from playwright.sync_api import expect
from pydantic import ValidationError

from benchmarks.rig.collector import collector
from tests.support.server.batches import ATTEMPT, batch, put, steps
from tests.support.server.browsing import Visit
from tests.support.server.serving import served

PATH = "/tools/ddpobs"


def test_a_collector_listens_on_ipv4_and_ipv6_at_once(tmp_path: Path) -> None:
    with collector(tmp_path, host="127.0.0.1,::1") as running:
        port = urlsplit(running.url).port
        for host in ("127.0.0.1", "[::1]"):
            assert httpx.get(f"http://{host}:{port}/readyz").status_code == 200
        assert f"http://127.0.0.1:{port} and http://[::1]:{port}" in running.log.read_text()


def test_every_interface_of_both_families_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no token"), collector(tmp_path, host="127.0.0.1,::"):
        pass
    with collector(tmp_path, host="0.0.0.0,::", token="s3cret") as running:
        port = urlsplit(running.url).port
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        assert httpx.get(f"http://[::1]:{port}/readyz").status_code == 200


def test_an_occupied_address_of_one_family_is_an_error() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(listening.AddressError, match="cannot listen on ::1"):
            listening.bind(["127.0.0.1", "::1"], port)


@pytest.mark.parametrize("host", ["", "127.0.0.1,", ",::1"])
def test_an_empty_address_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match="separated by commas"):
        Settings(host=host)


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests below `PATH` to a collector, with or without the path."""

    target = ""
    keeps_path = False

    def do_GET(self) -> None:
        if not self.path.startswith(f"{PATH}/"):
            self.send_error(404)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        path = self.path if self.keeps_path else self.path.removeprefix(PATH)
        answer = httpx.get(self.target + path, headers=headers)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name not in ("content-length", "content-encoding", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: object) -> None:
        """Write no line."""


@pytest.fixture(params=[False, True], ids=["path removed", "path kept"])
def below_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of a collector below a path of a proxy."""
    with collector(tmp_path, root_path=f"{PATH}/") as running:
        put(running.url, batch("behind", steps=steps(0, 2)))
        handler = type("Handler", (_Proxy,), {"target": running.url, "keeps_path": request.param})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}{PATH}"
        server.shutdown()
        server.server_close()


def test_the_page_and_the_documentation_work_below_a_path(below_path: str, browser: Any) -> None:
    visit = Visit(browser, f"{below_path}/")
    visit.page.get_by_role("link", name="behind").click()
    visit.page.wait_for_url(f"{below_path}/runs/behind")
    visit.page.locator("#processes tbody tr").first.wait_for()
    report = f"{PATH}/api/v1/runs/behind/report.html?attempt={ATTEMPT}"
    expect(visit.page.locator("#report")).to_have_attribute("href", report)
    visit.page.get_by_role("link", name="API").click()
    visit.page.get_by_text("ddpobs collector").first.wait_for()
    assert visit.errors == []
    assert all(address.startswith(below_path) for address in visit.requests)


def test_the_api_document_names_the_path(below_path: str) -> None:
    assert httpx.get(f"{below_path}/openapi.json").json()["servers"] == [{"url": PATH}]


def test_a_batch_is_accepted_below_a_path_that_the_proxy_keeps(tmp_path: Path) -> None:
    with collector(tmp_path, root_path=PATH) as running:
        for prefix in ("", PATH):
            assert put(f"{running.url}{prefix}", batch(f"x{len(prefix)}")).status_code == 201
        slashless = httpx.get(f"{running.url}{PATH}")
        assert (slashless.status_code, slashless.headers["location"]) == (308, f"{PATH}/")
        assert httpx.get(f"{running.url}{PATH}x/readyz").status_code == 404


@pytest.mark.parametrize("path", ["ddpobs", "/a b", "//x", "http://x/"])
def test_a_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        Settings(root_path=path)


def test_an_idle_connection_outlives_the_time_for_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_S", 0.3)
    with served() as address, httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
        first = client.get("/")
        local = first.extensions["network_stream"].get_extra_info("client_addr")
        threading.Event().wait(1.0)
        again = client.get("/")
        assert again.extensions["network_stream"].get_extra_info("client_addr") == local


def test_the_idle_time_is_a_setting(tmp_path: Path) -> None:
    with collector(tmp_path, keep_alive_s=1) as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port), 20) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
            while client.recv(65536):
                pass  # The collector closes the connection within the test's timeout.

"""People signed on by a real nginx, as configured in `deploy/`, and attacks on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.rig.collector import collector
from ddpobs import wire
from tests.support.server.batches import assert_problem, batch, steps
from tests.support.server.nginx import proxy

CONFIG = Path(__file__).resolve().parents[3] / "deploy" / "nginx-sign-on.conf"
TOKEN = "a-token-of-32-characters-for-tests"
PROXY = "127.0.0.5"
PEOPLE = {"ada": "staff,ml", "bob": "staff", "eve": "visitors"}
SETTINGS: dict[str, Any] = {
    "token": TOKEN,
    "sign_on_proxies": PROXY,
    "trusted_proxies": PROXY,
    "sign_on_groups": "ml=default:admin, staff=default:read",
}


class SignOnServer(BaseHTTPRequestHandler):
    """Knows people by a cookie, as oauth2-proxy does."""

    def do_GET(self) -> None:
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get("person")
        self.send_response(202 if cookie else 401)
        if cookie:
            self.send_header("X-Auth-Request-User", cookie.value)
            self.send_header("X-Auth-Request-Groups", PEOPLE[cookie.value])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def sign_on_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SignOnServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The proxy's address, and the collector's own one, with a run `mine`."""
    folder = tmp_path_factory.mktemp("sign-on")
    with ExitStack() as stack:
        own = stack.enter_context(collector(folder, **SETTINGS)).url
        config = CONFIG.read_text().replace("sign-on:4180", stack.enter_context(sign_on_server()))
        config = config.replace("collector:8321", own.removeprefix("http://"))
        config = config.replace("server_tokens off;", f"server_tokens off; proxy_bind {PROXY};")
        url = stack.enter_context(proxy(folder, [], config))
        assert put(url, Authorization=f"Bearer {TOKEN}").status_code == 201
        yield url, own


def put(url: str, cookie: str = "", run: str = "mine", **headers: str) -> httpx.Response:
    payload = batch(run, steps=steps(0, 4))
    address = f"{url}/api/v1/runs/{payload.run}/sources/{payload.source}/batches/{payload.seq}"
    sent = headers | {"Content-Type": wire.MSGPACK} | ({"Cookie": f"person={cookie}"} if cookie else {})
    return httpx.put(address, content=wire.encode(payload), headers=sent)


def get(url: str, person: str = "", path: str = "/api/v1/runs", **headers: str) -> httpx.Response:
    return httpx.get(url + path, headers=headers | ({"Cookie": f"person={person}"} if person else {}))


def directly(own: str, address: str, headers: Any) -> httpx.Response:
    """A request to the collector itself, from an address."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
        return client.get(f"{own}/api/v1/runs", headers=headers)


def test_a_person_reads_what_the_first_matching_group_may(urls: tuple[str, str]) -> None:
    url, _ = urls
    assert [run["run"] for run in get(url, "bob").json()["runs"]] == ["mine"]
    assert get(url, "bob", "/").status_code == 200
    refused = assert_problem(httpx.delete(f"{url}/api/v1/runs/mine", headers={"Cookie": "person=bob"}), 403)
    assert "bob has read" in refused["detail"]
    assert put(url, run="spare", Authorization=f"Bearer {TOKEN}").status_code == 201
    assert httpx.delete(f"{url}/api/v1/runs/spare", headers={"Cookie": "person=ada"}).is_success


def test_a_person_without_such_a_group_reads_nothing(urls: tuple[str, str]) -> None:
    assert "no group of eve" in assert_problem(get(urls[0], "eve"), 403)["detail"]


def test_nobody_reads_without_signing_on(urls: tuple[str, str]) -> None:
    response = get(urls[0], **{"X-WEBAUTH-USER": "ada", "X-WEBAUTH-GROUPS": "ml"})
    assert response.status_code == 302
    assert response.headers["Location"].endswith("/oauth2/sign_in?rd=/api/v1/runs")


def test_a_person_gains_no_group_by_headers_of_their_own(urls: tuple[str, str]) -> None:
    forged = {"X-WEBAUTH-USER": "ada", "X-WEBAUTH-GROUPS": "ml", "X_WEBAUTH_GROUPS": "ml", "Cookie": "person=bob"}
    refused = assert_problem(httpx.delete(f"{urls[0]}/api/v1/runs/mine", headers=forged), 403)
    assert "bob has read" in refused["detail"]


def test_a_token_that_nobody_gave_opens_nothing_with_the_headers_of_a_person(urls: tuple[str, str]) -> None:
    forged = {"X-WEBAUTH-USER": "ada", "X-WEBAUTH-GROUPS": "ml", "Authorization": "Bearer guess"}
    assert_problem(httpx.get(f"{urls[0]}/api/v1/runs", headers=forged), 401)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.6"])
def test_the_headers_are_ignored_from_any_peer_but_the_proxy(urls: tuple[str, str], address: str) -> None:
    headers = {"X-WEBAUTH-USER": "ada", "X-WEBAUTH-GROUPS": "ml"}
    assert_problem(directly(urls[1], address, headers), 401)
    assert_problem(directly(urls[1], address, headers | {"X-Forwarded-For": PROXY}), 401)
    assert directly(urls[1], PROXY, headers).status_code == 200


def test_the_proxy_is_known_by_its_connection_whatever_address_it_forwards(urls: tuple[str, str]) -> None:
    headers = {"X-WEBAUTH-USER": "ada", "X-WEBAUTH-GROUPS": "ml"}
    assert directly(urls[1], PROXY, headers | {"X-Forwarded-For": "10.9.8.7"}).status_code == 200


@pytest.mark.parametrize("name", ["X-WEBAUTH-USER", "X-WEBAUTH-GROUPS"])
def test_a_header_that_a_proxy_added_to_a_clients_own_is_refused(urls: tuple[str, str], name: str) -> None:
    headers = [("X-WEBAUTH-USER", "bob"), ("X-WEBAUTH-GROUPS", "staff"), (name, "ml")]
    assert "2 times" in assert_problem(directly(urls[1], PROXY, headers), 401)["detail"]


def test_a_name_with_underscores_names_nobody(urls: tuple[str, str]) -> None:
    assert_problem(directly(urls[1], PROXY, {"X_WEBAUTH_USER": "ada", "X_WEBAUTH_GROUPS": "ml"}), 401)


def test_a_person_sends_no_batches(urls: tuple[str, str]) -> None:
    assert_problem(put(urls[0], "ada"), 401)
    assert put(urls[0], "ada", Authorization=f"Bearer {TOKEN}").status_code == 200


def test_a_collector_with_sign_on_is_open_to_nobody_else(tmp_path: Path) -> None:
    with collector(tmp_path, sign_on_proxies=PROXY) as running:
        assert_problem(httpx.get(f"{running.url}/api/v1/runs"), 401)


def test_without_the_setting_the_headers_mean_nothing(tmp_path: Path) -> None:
    with collector(tmp_path, token=TOKEN) as running:
        assert_problem(directly(running.url, "127.0.0.1", {"X-WEBAUTH-USER": "ada"}), 401)

"""Who may call what, and whose runs they see."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.operations.commands import cli
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store, Token
from ddpobs_server.web import auth
from ddpobs_server.web.auth import Authenticator, Caller, new_token
from ddpobs_server.web.problems import Problem
from starlette.routing import Mount, Route
from typer.testing import CliRunner

from tests import databases
from tests.collector import collector
from tests.databases import Fresh
from tests.server.batches import assert_problem, batch, path, put, steps
from tests.server.serving import served

ROOT = Path(__file__).parents[3]
CALLS = {
    "ingest": [("PUT", path(batch("a-run", seq=1)))],
    "read": [
        ("GET", "/api/v1/runs"),
        ("GET", "/metrics"),
        *(
            ("GET", f"/api/v1/runs/a-run{what}")
            for what in (
                *("", "/ranks", "/layout", "/steps", "/spans", "/buckets"),
                *("/unused", "/stragglers", "/diagnostics", "/trace"),
            )
        ),
    ],
    "admin": [("DELETE", "/api/v1/runs/a-run")],
    "": [
        *(("GET", where) for where in ("/healthz", "/readyz", "/", "/runs/a-run", "/docs", "/openapi.json")),
        *(("GET", where) for where in ("/static/style.css", "/swagger/swagger-ui.css")),
    ],
}
"""By the scope that is needed; none for what anyone may ask."""
HOLDERS: dict[str, set[str]] = {
    "nobody": set(),
    "a wrong token": set(),
    "a revoked token": set(),
    "ingest": {"ingest"},
    "read": {"read"},
    "both": {"ingest", "read"},
    "admin": {"ingest", "read", "admin"},
}


def command(url: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ddpobs-server")), "token", *arguments, "--database-url", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def kept(url: str, name: str, workspace: str, *scopes: str) -> str:
    """As `token create`, without a process of its own."""
    store = Store(url)
    store.migrate()
    token, kept = new_token(name, workspace, list(scopes))
    store.add_token(kept)
    store.close()
    return token


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A collector with tokens, and each holder's header."""
    folder = tmp_path_factory.mktemp("guarded")
    database = databases.sqlite(folder)
    made = {
        "ingest": kept(database, "ranks", "default", "ingest"),
        "read": kept(database, "grafana", "default", "read"),
        "both": command(database, "create", "team"),
        "admin": kept(database, "operator", "default", "admin"),
        "a revoked token": kept(database, "gone", "default", "admin"),
        "other": command(database, "create", "others", "--scope", "admin", "--workspace", "vision"),
        "a wrong token": "ddpobs_00000000_wrong",
    }
    command(database, "revoke", made["a revoked token"].split("_")[1])
    with collector(folder, database_url=database) as running:
        yield {
            "url": running.url,
            "database": database,
            "nobody": {},
            **{holder: {"Authorization": f"Bearer {token}"} for holder, token in made.items()},
        }


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(("scope", "method", "where"), [(s, *call) for s, calls in CALLS.items() for call in calls])
def test_a_call_is_answered_for_whoever_may_and_nobody_else(
    guarded: dict[str, Any], holder: str, scope: str, method: str, where: str
) -> None:
    url = guarded["url"]
    put(url, batch("a-run", steps=steps(0, 2)), **guarded["admin"])
    content = {"content": b""} if method == "PUT" else {}
    answer = httpx.request(method, url + where, headers=guarded[holder], timeout=30, **content)  # type: ignore[arg-type]
    if scope in HOLDERS[holder] | {""}:
        assert answer.status_code not in (401, 403), answer.text
    else:
        # Whoever tries wrong tokens for long is told to wait.
        expected = 429 if answer.status_code == 429 and "token" in holder else 403 if HOLDERS[holder] else 401
        assert_problem(answer, expected)


def test_every_route_is_in_the_table() -> None:
    app = create_app(Settings())
    routes = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    for route in app.routes:
        if isinstance(route, Route | Mount):  # not in the document: the page and its files
            routes.add(("GET", route.path + ("/{file}" if isinstance(route, Mount) else "")))
    called = [f"{method} {where}" for calls in CALLS.values() for method, where in calls]
    patterns = {f"{method} {path}": re.sub(r"\{\w+\}", "[^/]+", f"{method} {path}") for method, path in routes}
    assert len(routes) > 20
    assert [name for name, pattern in patterns.items() if not any(re.fullmatch(pattern, one) for one in called)] == []


def test_the_document_asks_for_a_token_where_one_is_needed() -> None:
    document = create_app(Settings()).openapi()
    ((name, scheme),) = document["components"]["securitySchemes"].items()
    assert (document["openapi"], scheme["type"], scheme["scheme"]) == ("3.0.3", "http", "bearer")
    anyone = {where for _, where in CALLS[""]}
    for where, item in document["paths"].items():
        for method, operation in item.items():
            assert operation.get("security") == (None if where in anyone else [{name: []}]), (method, where)


def test_workspaces_see_their_own_runs_alone(guarded: dict[str, Any]) -> None:
    url, mine, theirs = guarded["url"], guarded["admin"], guarded["other"]
    assert put(url, batch("both-have-it", steps=steps(0, 2)), **mine).status_code == 201
    assert put(url, batch("both-have-it", steps=steps(0, 5)), **theirs).status_code == 201
    assert put(url, batch("only-mine"), **mine).status_code == 201

    of_run = "/api/v1/runs/a-run"

    def runs(who: dict[str, str]) -> dict[str, int]:
        found = httpx.get(f"{url}/api/v1/runs", headers=who).json()["runs"]
        return {run["run"]: run["steps"] for run in found}

    assert runs(mine)["both-have-it"] == 2
    assert runs(theirs) == {"both-have-it": 5}
    of_a_run = [where.removeprefix(of_run) for _, where in CALLS["read"] if where.startswith(of_run)]
    assert len(of_a_run) > 8
    for what in of_a_run:
        found = httpx.get(f"{url}/api/v1/runs/both-have-it{what}", headers=theirs)
        assert (found.status_code, "vision/" in found.text) == (200, False), "its own run, by its own name"
        assert_problem(httpx.get(f"{url}/api/v1/runs/only-mine{what}", headers=theirs), 404)
    assert_problem(httpx.get(f"{url}/api/v1/runs/vision%2Fboth-have-it", headers=mine), 404)
    assert b"only-mine" in httpx.get(f"{url}/metrics", headers=mine).content
    assert b"only-mine" not in httpx.get(f"{url}/metrics", headers=theirs).content
    assert httpx.delete(f"{url}/api/v1/runs/both-have-it", headers=theirs).status_code == 204
    assert runs(theirs) == {}
    assert runs(mine)["both-have-it"] == 2
    long = assert_problem(put(url, batch("r" * 125), **theirs), 422)
    assert "at most 121" in long["detail"]


def test_a_run_id_that_the_wires_document_allows_in_every_workspace_is_allowed() -> None:
    said = re.search(r"(\d+) characters fit into every", (ROOT / "docs" / "wire.md").read_text())
    assert said is not None
    longest = Caller("w" * 32, frozenset()).key("r" * int(said[1]))
    with pytest.raises(Problem, match=f"at most {said[1]} characters"):
        Caller("w" * 32, frozenset()).key("r" * (int(said[1]) + 1))
    assert len(longest) == 128


def test_only_a_hash_is_kept_and_the_list_shows_no_secret(guarded: dict[str, Any]) -> None:
    listed = command(guarded["database"], "list")
    assert "vision  admin" in listed
    assert "gone revoked" in listed
    secret = guarded["admin"]["Authorization"].split("_", 2)[2]
    assert secret not in listed


def test_a_revoked_token_stops_working_within_seconds(fresh: Fresh, tmp_path: Path) -> None:
    database = fresh(tmp_path)
    first, second = (kept(database, name, "default", "read") for name in "ab")
    with collector(tmp_path, database_url=database) as running, httpx.Client(base_url=running.url) as kept_alive:
        headers = {"Authorization": f"Bearer {second}"}
        assert kept_alive.get("/api/v1/runs", headers=headers).status_code == 200
        store = Store(database)
        assert store.revoke_token(second.split("_")[1], time.time_ns())
        store.close()
        deadline = time.monotonic() + 30
        while kept_alive.get("/api/v1/runs", headers=headers).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        headers = {"Authorization": f"Bearer {first}"}
        assert kept_alive.get("/api/v1/runs", headers=headers).status_code == 200


def test_a_new_token_works_at_once_for_all_who_come_with_it(fresh: Fresh, tmp_path: Path) -> None:
    database = fresh(tmp_path)
    kept(database, "first", "default", "read")
    with collector(tmp_path, database_url=database) as running, ThreadPoolExecutor(8) as ranks:
        assert_problem(httpx.get(f"{running.url}/api/v1/runs"), 401)
        for name in "ab":  # The second comes when the collector has just looked.
            headers = {"Authorization": f"Bearer {kept(database, name, 'default', 'ingest')}"}
            sent = [batch(name, seq=seq) for seq in range(8)]
            answers = ranks.map(lambda one, headers=headers: put(running.url, one, **headers).status_code, sent)
            assert list(answers) == [201] * 8


class Watched(Store):
    """Notes when it is asked for the tokens."""

    asked: ClassVar[list[float]] = []

    def tokens(self) -> list[Token]:
        self.asked.append(time.monotonic())
        return super().tokens()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When that was; none yet."""
    monkeypatch.setattr(Watched, "asked", [])
    return Watched.asked


@pytest.fixture
def database(tmp_path: Path) -> str:
    return databases.sqlite(tmp_path)


@pytest.fixture
def authenticator(database: str, asked: list[float]) -> Iterator[Authenticator]:
    """One that has read its tokens: s3cret, and one of the database's."""
    kept(database, "first", "default", "read")
    store = Watched(database)
    made = Authenticator(Settings(database_url=database, token="s3cret"), store)
    made.look()
    yield made
    store.close()


@pytest.fixture
def statuses(authenticator: Authenticator) -> Iterator[Callable[..., set[int]]]:
    """What the bearers of some tokens are told who come at the same time, all from one address."""

    async def call(token: str) -> int:
        try:
            await authenticator.refresh_if_stale(f"Bearer {token}", "here")
            authenticator.caller(f"Bearer {token}", "here")
        except Problem as refused:
            return int(refused.document["status"])
        return 200

    async def call_all(tokens: tuple[str, ...]) -> set[int]:
        return set(await asyncio.gather(*map(call, tokens)))

    with asyncio.Runner() as loop:
        yield lambda *tokens: loop.run(call_all(tokens))


def test_a_flood_of_wrong_tokens_asks_the_database_once_a_second(
    statuses: Callable[..., set[int]], asked: list[float]
) -> None:
    for count in (10, 100):
        wrong = [new_token("", "", [])[0] for _ in range(count)]
        assert statuses(*wrong) <= {401, 429}
    assert statuses(new_token("", "", [])[0]) == {429}
    assert len(asked) == 3
    assert min(later - earlier for earlier, later in pairwise(asked)) > 0.9


def test_unknown_tokens_hold_up_no_read_of_a_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_NEW_S", 5.0)
    database = f"sqlite:///{tmp_path}/runs.db"
    headers = {"Authorization": f"Bearer {kept(database, 'known', 'default', 'read')}"}
    app = create_app(Settings(database_url=database))
    with served(app) as (host, port), ThreadPoolExecutor(16) as strangers:
        url = f"http://{host}:{port}/api/v1/runs"
        assert httpx.get(url, headers=headers).status_code == 200

        def ask(_: int) -> float:
            httpx.get(url, headers={"Authorization": f"Bearer {new_token('', '', [])[0]}"}, timeout=60)
            return time.monotonic()

        asked = [strangers.submit(ask, number) for number in range(16)]
        while not any(one.running() for one in asked):
            time.sleep(0.001)
        assert httpx.get(url, headers=headers, timeout=60).status_code == 200
        answered = time.monotonic()
        assert sum(one.result() > answered for one in asked) > 4, "more than have turns still wait"


def test_what_can_be_no_new_token_asks_nothing(
    statuses: Callable[..., set[int]], authenticator: Authenticator, asked: list[float], database: str
) -> None:
    store = Store(database)
    revoked, known = new_token("gone", "default", ["read"])
    store.add_token(known)
    store.revoke_token(known.token_id, time.time_ns())
    store.close()
    authenticator.look()
    assert statuses(revoked, revoked[:-1] + "!", "guess", "ddpobs_0_0") == {401}
    assert len(asked) == 2


def test_a_token_that_turns_out_right_was_no_wrong_one(statuses: Callable[..., set[int]], database: str) -> None:
    new = kept(database, "new", "default", "read")
    assert statuses(*[new] * 30) == {200}
    assert statuses("s3cret") == {200}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_to_revoke_the_last_token_opens_nothing(tmp_path: Path, host: str) -> None:
    settings = Settings(database_url=databases.sqlite(tmp_path), host=host)
    token = kept(settings.database_url, "last", "default", "read")
    store = Store(settings.database_url)
    authenticator = Authenticator(settings, store)
    authenticator.look()
    assert authenticator.caller(f"Bearer {token}", "here").scopes == {"read"}
    assert store.revoke_token(token.split("_")[1], time.time_ns())
    authenticator.look()
    for header in ("", f"Bearer {token}"):
        with pytest.raises(Problem) as refused:
            authenticator.caller(header, "here")
        assert refused.value.status == 401
    store.close()


def test_who_tries_many_wrong_tokens_has_to_wait(tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as running:
        wrong = {"Authorization": "Bearer guess"}
        for _ in range(20):
            assert_problem(httpx.get(f"{running.url}/api/v1/runs", headers=wrong), 401)
        refused = httpx.get(f"{running.url}/api/v1/runs", headers={"Authorization": "Bearer s3cret"})
        assert_problem(refused, 429)
        assert 0 < int(refused.headers["retry-after"]) <= 61


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", "--scope", "write"),
        ("x", "--workspace", "no/slash"),
        ("x", "--workspace", ""),
        ("two\nlines",),
        ("\x1b[m",),
    ],
)
def test_what_no_token_can_have_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("ddpobs-server")), "token", "create"),
            *(*arguments, "--database-url", f"sqlite:///{tmp_path}/x.db"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "expected" in done.stderr


def test_whoever_makes_a_token_is_told_where_it_is_kept(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    made = CliRunner().invoke(cli, ["token", "create", "x", "--database-url", url])
    assert made.exit_code == 0
    assert url in made.stderr
    assert "ingest, read in workspace default" in made.stderr
    assert len(made.stdout.split()) == 1


def test_every_command_says_which_database_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "sqlite:///x.db"

    def run(*arguments: str) -> tuple[int, list[str], str]:
        done = CliRunner().invoke(cli, ["token", *arguments, "--database-url", url])
        where = f"sqlite:///{tmp_path}/x.db"
        assert (where in done.stderr, done.stderr.count("\n")) == (True, 1), done.stderr
        return done.exit_code, done.stdout.split(), done.stderr

    code, (token,), _ = run("create", "x")
    token_id = token.split("_")[1]
    assert (code, run("list")[1][0]) == (0, token_id)
    assert run("revoke", token_id)[0] == 0
    code, _, said = run("revoke", token_id)
    assert (code, f"no token {token_id} that works" in said) == (1, True)


@pytest.mark.parametrize("arguments", [("list",), ("revoke", "abcd")])
def test_where_no_database_is_none_is_made(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["token", *arguments, "--database-url", f"sqlite:///{tmp_path}/x.db"])
    assert (done.exit_code, done.stderr) == (1, f"ddpobs-server: no database {tmp_path}/x.db\n")
    assert list(tmp_path.iterdir()) == []

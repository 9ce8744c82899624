"""Authentication, the scopes of each route, and the separation of workspaces."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.operations.commands import cli
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.authenticator import Caller
from ddpobs_server.web.problems import Problem
from starlette.routing import Mount, Route
from typer.testing import CliRunner

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import collector
from benchmarks.rig.databases import Fresh
from tests.support.server.batches import assert_problem, batch, put, steps
from tests.support.server.calls import CALLS
from tests.support.server.tokens import create_token

ROOT = Path(__file__).parents[3]
HOLDERS: dict[str, set[str]] = {
    "no token": set(),
    "a wrong token": set(),
    "a revoked token": set(),
    "ingest": {"ingest"},
    "read": {"read"},
    "both": {"ingest", "read", "ingest and read"},
    "admin": {"ingest", "read", "ingest and read", "admin"},
}


def command(url: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ddpobs-server")), "token", *arguments, "--database-url", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience.HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A collector with tokens, and each holder's header."""
    folder = tmp_path_factory.mktemp("guarded")
    database = databases.sqlite(folder)
    tokens = {
        "ingest": create_token(database, "ranks", "default", "ingest"),
        "read": create_token(database, "grafana", "default", "read"),
        "both": command(database, "create", "team"),
        "admin": create_token(database, "operator", "default", "admin"),
        "a revoked token": create_token(database, "gone", "default", "admin"),
        "other": command(database, "create", "others", "--scope", "admin", "--workspace", "vision"),
        "a wrong token": "ddpobs_00000000_wrong",
    }
    command(database, "revoke", tokens["a revoked token"].split("_")[1])
    with collector(folder, database_url=database) as running:
        yield {
            "url": running.url,
            "database": database,
            "no token": {},
            **{holder: {"Authorization": f"Bearer {token}"} for holder, token in tokens.items()},
        }


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(("scope", "method", "where"), [(s, *call) for s, calls in CALLS.items() for call in calls])
def test_a_request_succeeds_only_with_its_scope(
    guarded: dict[str, Any], holder: str, scope: str, method: str, where: str
) -> None:
    url = guarded["url"]
    put(url, batch("a-run", steps=steps(0, 2)), **guarded["admin"])
    content = b"" if method == "PUT" else None
    answer = httpx.request(method, url + where, headers=guarded[holder], content=content)
    if scope in HOLDERS[holder] | {""}:
        assert answer.status_code not in (401, 403), answer.text
    else:
        # After many wrong tokens the address has to wait.
        wrong = holder in ("a wrong token", "a revoked token")
        expected = 429 if answer.status_code == 429 and wrong else 403 if HOLDERS[holder] else 401
        assert_problem(answer, expected)


def test_every_route_is_in_the_table() -> None:
    app = create_app(Settings())
    routes = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    for route in app.routes:
        if isinstance(route, Route | Mount):  # The page and its files are not in the document.
            routes.add(("GET", route.path + ("/{file}" if isinstance(route, Mount) else "")))
    called = [f"{method} {where.partition('?')[0]}" for calls in CALLS.values() for method, where in calls]
    patterns = {f"{method} {path}": re.sub(r"\{\w+\}", "[^/]+", f"{method} {path}") for method, path in routes}
    assert len(routes) > 20
    assert [name for name, pattern in patterns.items() if not any(re.fullmatch(pattern, call) for call in called)] == []


def test_the_document_requires_a_token_exactly_where_the_route_does() -> None:
    document = create_app(Settings()).openapi()
    ((name, scheme),) = document["components"]["securitySchemes"].items()
    assert (document["openapi"], scheme["type"], scheme["scheme"]) == ("3.0.3", "http", "bearer")
    public = {where for _, where in CALLS[""]}
    for where, item in document["paths"].items():
        for method, operation in item.items():
            assert operation.get("security") == (None if where in public else [{name: []}]), (method, where)


def test_a_workspace_sees_only_its_own_runs(guarded: dict[str, Any]) -> None:
    url, admin, other = guarded["url"], guarded["admin"], guarded["other"]
    assert put(url, batch("both-have-it", steps=steps(0, 2)), **admin).status_code == 201
    assert put(url, batch("both-have-it", steps=steps(0, 5)), **other).status_code == 201
    assert put(url, batch("only-default"), **admin).status_code == 201

    prefix = "/api/v1/runs/a-run"

    def runs(headers: dict[str, str]) -> dict[str, int]:
        page = httpx.get(f"{url}/api/v1/runs", headers=headers).json()
        return {run["run"]: run["steps"] for run in page["runs"]}

    assert runs(admin)["both-have-it"] == 2
    assert runs(other) == {"both-have-it": 5}
    reads = [where.removeprefix(prefix) for _, where in CALLS["read"] if where.startswith(prefix)]
    routes = [read.replace("with=a-run", "with=both-have-it") for read in reads]
    assert len(routes) > 8
    for route in routes:
        answer = httpx.get(f"{url}/api/v1/runs/both-have-it{route}", headers=other)
        assert (answer.status_code, "vision/" in answer.text) == (200, False), "its own run, by its own name"
        assert_problem(httpx.get(f"{url}/api/v1/runs/only-default{route}", headers=other), 404)
    assert_problem(httpx.get(f"{url}/api/v1/runs/vision%2Fboth-have-it", headers=admin), 404)
    assert b"only-default" in httpx.get(f"{url}/metrics", headers=admin).content
    assert b"only-default" not in httpx.get(f"{url}/metrics", headers=other).content
    assert httpx.delete(f"{url}/api/v1/runs/both-have-it", headers=other).status_code == 204
    assert runs(other) == {}
    assert runs(admin)["both-have-it"] == 2
    long = assert_problem(put(url, batch("r" * 125), **other), 422)
    assert "at most 121" in long["detail"]


def test_the_run_id_length_in_the_wire_document_fits_every_workspace() -> None:
    match = re.search(r"(\d+) characters fit into every", (ROOT / "docs" / "wire.md").read_text())
    assert match is not None
    longest = Caller("w" * 32, frozenset()).key("r" * int(match[1]))
    with pytest.raises(Problem, match=f"at most {match[1]} characters"):
        Caller("w" * 32, frozenset()).key("r" * (int(match[1]) + 1))
    assert len(longest) == 128


def test_the_list_of_tokens_shows_no_secret(guarded: dict[str, Any]) -> None:
    listed = command(guarded["database"], "list")
    assert "vision  admin" in listed
    assert "gone revoked" in listed
    secret = guarded["admin"]["Authorization"].split("_", 2)[2]
    assert secret not in listed


def test_a_revoked_token_stops_working_within_seconds(fresh: Fresh, tmp_path: Path) -> None:
    database = fresh(tmp_path)
    first, second = (create_token(database, name, "default", "read") for name in "ab")
    with collector(tmp_path, database_url=database) as running, httpx.Client(base_url=running.url) as client:
        headers = {"Authorization": f"Bearer {second}"}
        assert client.get("/api/v1/runs", headers=headers).status_code == 200
        store = Store(database)
        assert store.revoke_token(second.split("_")[1], time.time_ns())
        store.close()
        deadline = time.monotonic() + patience.HANG_S
        while client.get("/api/v1/runs", headers=headers).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        headers = {"Authorization": f"Bearer {first}"}
        assert client.get("/api/v1/runs", headers=headers).status_code == 200


def test_a_new_token_works_at_once_for_all_its_clients(fresh: Fresh, tmp_path: Path) -> None:
    database = fresh(tmp_path)
    create_token(database, "first", "default", "read")
    with collector(tmp_path, database_url=database) as running, ThreadPoolExecutor(8) as ranks:
        assert_problem(httpx.get(f"{running.url}/api/v1/runs"), 401)
        for name in "ab":  # The second is created just after the collector has refreshed its cache.
            headers = {"Authorization": f"Bearer {create_token(database, name, 'default', 'ingest')}"}
            payloads = [batch(name, seq=seq) for seq in range(8)]
            answers = ranks.map(
                lambda payload, headers=headers: put(running.url, payload, **headers).status_code, payloads
            )
            assert list(answers) == [201] * 8


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
def test_invalid_scopes_workspaces_and_names_of_tokens_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("ddpobs-server")), "token", "create"),
            *(*arguments, "--database-url", f"sqlite:///{tmp_path}/x.db"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience.HANG_S,
    )
    assert done.returncode == 2
    assert "expected" in done.stderr


def test_creating_a_token_prints_its_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    created = CliRunner().invoke(cli, ["token", "create", "x", "--database-url", url])
    assert created.exit_code == 0
    assert url in created.stderr
    assert "ingest, read in workspace default" in created.stderr
    assert len(created.stdout.split()) == 1


def test_every_token_command_prints_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    code, _, errors = run("revoke", token_id)
    assert (code, f"no valid token {token_id} in " in errors) == (1, True)


@pytest.mark.parametrize("arguments", [("list",), ("revoke", "abcd")])
def test_list_and_revoke_create_no_database(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["token", *arguments, "--database-url", f"sqlite:///{tmp_path}/x.db"])
    assert (done.exit_code, done.stderr) == (1, f"ddpobs-server: no database {tmp_path}/x.db\n")
    assert list(tmp_path.iterdir()) == []

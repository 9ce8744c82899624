"""The audit log: what people, tokens and commands changed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
from ddpobs_server.operations.commands import cli
from ddpobs_server.store import AuditEntry, Store
from typer.testing import CliRunner

from benchmarks.rig.collector import collector
from benchmarks.rig.databases import Fresh
from tests.support.server.batches import assert_problem, batch, put
from tests.support.server.tokens import create_token

SIGN_ON: dict[str, Any] = {"sign_on_proxies": "127.0.0.1", "sign_on_groups": "ml=team:admin"}
ADA = {"X-WEBAUTH-USER": "ada", "X-WEBAUTH-GROUPS": "ml"}


def operate(database: str, *arguments: str) -> str:
    done = CliRunner().invoke(cli, [*arguments, "--database-url", database])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_each_change_is_recorded_with_who_made_it(fresh: Fresh, tmp_path: Path) -> None:
    database = fresh(tmp_path)
    tokens = {name: create_token(database, name, "team", "ingest", "read") for name in ("ranks", "label")}
    admin, other = (create_token(database, "operator", workspace, "admin") for workspace in ("default", "other"))
    headers = {name: {"Authorization": f"Bearer {token}"} for name, token in tokens.items()}
    gone = operate(database, "token", "create", "gone", "--workspace", "team").split("_")[1]
    operate(database, "token", "revoke", gone)
    operate(database, "workspace", "limits", "team", "--share", "0.25")
    with collector(tmp_path, database_url=database, **SIGN_ON) as running:
        assert put(running.url, batch("mine"), **headers["ranks"]).status_code == 201
        run = f"{running.url}/api/v1/runs/mine"
        httpx.patch(run, json={"tags": ["kept"]}, headers=headers["label"]).raise_for_status()
        httpx.delete(run, headers=ADA).raise_for_status()
        assert_problem(httpx.delete(run, headers=ADA), 404)

        def audit(token: str, **query: Any) -> Any:
            header = {"Authorization": f"Bearer {token}"}
            return httpx.get(f"{running.url}/api/v1/audit", params=query, headers=header).raise_for_status().json()

        entries = audit(admin)["entries"]
        assert audit(other)["entries"] == []
        first = audit(admin, limit=2)
        rest = audit(admin, limit=500, cursor=first["next"])
        of_person = httpx.get(f"{running.url}/api/v1/audit", headers=ADA).json()["entries"]
    assert first["entries"] + rest["entries"] == entries == of_person
    label_id = tokens["label"].split("_")[1]
    facts = [tuple(entry[name] for name in ("action", "subject", "kind", "token_id")) for entry in entries]
    assert facts == [
        ("run.delete", "mine", "person", ""),
        ("run.labels", "mine", "token", label_id),
        ("workspace.limits", "team", "command", ""),
        ("token.revoke", gone, "command", ""),
        ("token.create", gone, "command", ""),
    ]
    assert [entry["identity"] for entry in entries[:2]] == ["ada", "label"]
    assert {entry["workspace"] for entry in entries} == {"team"}
    assert (entries[0]["peer"], entries[1]["detail"]) == ("127.0.0.1", {"tags": ["kept"]})
    assert entries[2]["detail"] == {"share": 0.25}
    printed = operate(database, "audit", "--workspace", "team").splitlines()
    assert "run.delete  mine  person ada from 127.0.0.1" in printed[0]
    assert json.loads(operate(database, "audit", "--json", "--limit", "1"))["identity"] == "ada"


def test_a_workspace_keeps_its_latest_entries_whatever_others_change(store: Store) -> None:
    def change(workspace: str, number: int) -> None:
        entry = AuditEntry("run.delete", f"run-{number}", workspace, "token", "ci", "", "", {}, time.time_ns() + number)
        store.add_audit_entry(entry)

    for number in range(5):
        change("loud", number)
    change("quiet", 0)
    assert store.prune_audit_log(2) == 3
    assert [entry.subject for entry in store.audit_entries(10, "loud")] == ["run-4", "run-3"]
    assert len(store.audit_entries(10, "quiet")) == 1
    assert store.prune_audit_log(2) == 0


def test_a_change_of_nothing_has_no_entry(store: Store) -> None:
    entry = AuditEntry("token.revoke", "00000000", "default", "command", "me", "", "", {}, time.time_ns())
    assert not store.revoke_token("00000000", 1, entry)
    assert not store.set_labels("none", [], "", entry)
    assert store.audit_entries(10) == []

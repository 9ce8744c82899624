"""Tags and notes of runs: those that a person gave, else those of the training. A run is found by them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, select

from ddpobs import wire
from ddpobs.wire.facts import SettingFacts, read_facts
from ddpobs_server.store import schema
from ddpobs_server.store.queries.audit_queries import add_entry
from ddpobs_server.store.rows import AuditEntry, Run

_SEARCHED = 5000
"""Characters of a run's text that a search reads: more than those of a name, a host, 16 tags and a note."""
_r, _s = schema.runs.c, schema.sources.c


def set_labels(
    connection: Connection,
    run: str,
    tags: Sequence[str] | None,
    note: str | None,
    entry: AuditEntry | None = None,
) -> bool:
    """Replace the tags and the note of a run; False if there is no such run.

    Args:
        connection: In a transaction.
        run: The run.
        tags: Tags in order; None leaves them.
        note: The note; None leaves it.
        entry: Entry of the audit log for the change; None for none.
    """
    values: dict[str, str] = {}
    if tags is not None:
        values["tags"] = msgspec.json.encode(list(tags)).decode()
    if note is not None:
        values["note"] = note
    statement = schema.runs.update().where(_r.run_id == run)
    changed = bool(connection.execute(statement.values(values or {"run_id": _r.run_id})).rowcount)
    if changed:
        write_search_text(connection, run)
    add_entry(connection, entry if changed else None)
    return changed


def write_search_text(connection: Connection, run: str) -> None:
    """Write the text by which the run is found. Its parts are its labels, and the hello of its lowest rank.

    Args:
        connection: In a transaction that holds the lock on the run's row.
        run: The run.
    """
    of_attempt = (_s.run_id == run) & (_s.attempt == _r.attempt)
    query = select(_r.tags, _r.note, _r.search_text, _s.hello).outerjoin(schema.sources, of_attempt)
    row = connection.execute(query.where(_r.run_id == run).order_by(_s.rank).limit(1)).one()
    hello = None if row.hello is None else msgspec.json.decode(row.hello, type=wire.Hello)
    tags, note = _given_or_trained(decoded_tags(row.tags), row.note, trained_labels(hello))
    host = hello.host if hello is not None else ""
    text = folded("\n".join((run.rpartition("/")[2], host, *(f"#{tag}" for tag in tags), note)))[:_SEARCHED]
    if text != row.search_text:
        connection.execute(schema.runs.update().where(_r.run_id == run).values(search_text=text))


def folded(text: str) -> str:
    """A text as a search compares it: in lower case, and as PostgreSQL can store it."""
    return text.lower().replace("\0", "\ufffd")


def trained_labels(hello: wire.Hello | None) -> tuple[tuple[str, ...], str]:
    """Return the tags and the note that the training set."""
    settings = read_facts(hello.settings if hello is not None else {}, SettingFacts)
    return tuple(tag for tag in settings.tags.split(",") if tag), settings.note


def labels_of(run: Run, trained: tuple[Sequence[str], str]) -> tuple[list[str], str]:
    """Return the tags and the note of a run: those that a person set, else those of the training."""
    return _given_or_trained(run.tags, run.note, trained)


def decoded_tags(text: str | None) -> tuple[str, ...] | None:
    """Return stored tags; None if they were never set."""
    return None if text is None else msgspec.json.decode(text, type=tuple[str, ...])


def _given_or_trained(
    tags: Sequence[str] | None, note: str | None, trained: tuple[Sequence[str], str]
) -> tuple[list[str], str]:
    return list(trained[0] if tags is None else tags), trained[1] if note is None else note

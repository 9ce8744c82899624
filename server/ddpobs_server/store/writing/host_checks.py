"""Rates of hosts in checks before a training: the latest ones of each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection, select

from ddpobs_server.store import schema
from ddpobs_server.store.database.sql import insert

Rates = dict[str, float]
"""Rate by measure, in operations or bytes a second."""
_c = schema.host_checks.c
_KEPT = 16
"""Latest checks of a host that are kept."""
_MAX_ROWS = 20_000
"""Maximum number of rows of a workspace; those that were not checked for longest go."""
_NAMES = 500
"""Hosts of one statement."""
_decode = msgspec.json.Decoder(list[Rates]).decode


def add(
    connection: Connection, workspace: str, device: str, hosts: Mapping[tuple[str, int], Rates], now_ns: int
) -> dict[tuple[str, int], list[Rates]]:
    """Add a check, and return the earlier ones of its hosts with the same device and number of ranks.

    Args:
        connection: In a transaction.
        workspace: Workspace of the hosts.
        device: Kind of device that was measured.
        hosts: Rates by host and its number of ranks.
        now_ns: The collector's wall clock.
    """
    earlier: dict[tuple[str, int], list[Rates]] = {}
    own = _c.workspace == workspace
    for names in _pages(sorted({host for host, _ in hosts})):
        query = select(_c.host, _c.ranks, _c.rates).where(own, _c.device == device, _c.host.in_(names))
        stored = {(host, ranks): _decode(rates) for host, ranks, rates in connection.execute(query)}
        earlier |= {key: stored[key] for key in hosts.keys() & stored.keys()}
    statement = insert(connection.dialect.name, schema.host_checks)
    new = {name: statement.excluded[name] for name in ("made_ns", "rates")}
    upsert = statement.on_conflict_do_update(index_elements=["workspace", "host", "device", "ranks"], set_=new)
    key = {"workspace": workspace, "device": device, "made_ns": now_ns}
    rows = [
        key | {"host": host, "ranks": ranks, "rates": _text([*earlier.get((host, ranks), []), rates][-_KEPT:])}
        for (host, ranks), rates in sorted(hosts.items())
    ]
    connection.execute(upsert, rows)
    oldest_kept = select(_c.made_ns).where(own).order_by(_c.made_ns.desc()).offset(_MAX_ROWS - 1).limit(1)
    if (made_ns := connection.execute(oldest_kept).scalar()) is not None:
        connection.execute(schema.host_checks.delete().where(own, _c.made_ns < made_ns))
    return earlier


def _pages(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + _NAMES] for first in range(0, len(names), _NAMES)]


def _text(rates: list[Rates]) -> str:
    return msgspec.json.encode(rates).decode()

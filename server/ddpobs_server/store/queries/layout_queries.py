"""Layouts of attempts: as outlines without parameter names, or whole within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from sqlalchemy import Connection, Select, Text, and_, cast, func, literal_column, or_, select

from ddpobs import wire
from ddpobs.shared.words import unit_title
from ddpobs_server.store import schema
from ddpobs_server.store.aggregate_rows import LayoutOutline
from ddpobs_server.store.selected_sources import SelectedSources

RESPONSE_BYTES = 16_000_000
"""Maximum bytes of layouts in a response. A batch may be as large, so the first layout always fits."""
_GROUP, _BUFFERED = 64, 4
"""Layouts that a statement looks up, and that the driver buffers: each may have 16 MB."""
_RANK_DIGITS = 19
_CACHED_BUCKETS = 1_000_000
"""Maximum number of buckets in the cached outlines of all runs."""


class LayoutKey(NamedTuple):
    """A layout, and the source of the lowest rank that sent it."""

    run: str
    module: int
    revision: int
    source: str


class _Parameter(msgspec.Struct, gc=False):
    """Counts a parameter. Its name and size are skipped."""


class _Bucket(msgspec.Struct, gc=False):
    size_bytes: int
    dtype: str
    parameters: list[_Parameter]
    kind: str = ""
    unit: str = ""


class _Outline(msgspec.Struct, gc=False):
    name: str
    buckets: list[_Bucket]


_decode_outline = msgspec.json.Decoder(_Outline).decode
_decode_layout = msgspec.json.Decoder(wire.Layout).decode


def keys(connection: Connection, sources: SelectedSources, module: int | None = None) -> list[LayoutKey]:
    """Each layout once, by run, module and revision. Reads the index alone, and no body."""
    rows = sources.execute(connection, _keys, module)
    return sorted(LayoutKey(run, module, revision, source[_RANK_DIGITS:]) for run, module, revision, source in rows)


def _keys(sources: SelectedSources, module: int | None) -> Select[Any]:
    """Layouts, each with the source of the lowest rank that sent it, after that rank in `_RANK_DIGITS` digits."""
    c = schema.layouts.c
    key = (c.run_id, c.module, c.revision)
    rank = cast(sources.c.rank + literal_column(str(2 * 10 ** (_RANK_DIGITS - 1))), Text)
    query = select(*key, func.min(rank + sources.c.source)).join(*sources.joined(schema.layouts)).group_by(*key)
    return query if module is None else query.where(c.module == module)


def whole(
    connection: Connection, sources: SelectedSources, module: int | None = None, limit_bytes: int = RESPONSE_BYTES
) -> tuple[list[wire.Layout], int]:
    """The layouts of one attempt by module and revision, up to a size, and the number of layouts beyond it."""
    layout_keys = keys(connection, sources, module)
    layouts: list[wire.Layout] = []
    remaining = limit_bytes
    for _, body in bodies(connection, layout_keys):
        remaining -= len(body)
        if remaining < 0 and layouts:
            break
        layouts.append(_decode_layout(body))
    layouts.sort(key=lambda layout: (layout.module, layout.revision))
    return layouts, len(layout_keys) - len(layouts)


def bodies(connection: Connection, layout_keys: Sequence[LayoutKey]) -> Iterator[tuple[LayoutKey, str]]:
    """The stored text of each layout, in any order; few texts are in memory at a time."""
    c = schema.layouts.c
    for first in range(0, len(layout_keys), _GROUP):
        group = layout_keys[first : first + _GROUP]
        same = [
            and_(c.run_id == run, c.source == source, c.module == module, c.revision == revision)
            for run, module, revision, source in group
        ]
        query = select(c.run_id, c.module, c.revision, c.source, c.body).where(or_(*same))
        rows = connection.execute(query.execution_options(yield_per=_BUFFERED))
        yield from ((LayoutKey(*row[:4]), row[4]) for row in rows)


class LayoutOutlines:
    """Reads outlines of layouts. A stored layout never changes, so its outline is read once and cached."""

    def __init__(self) -> None:
        self._cache: OrderedDict[LayoutKey, LayoutOutline] = OrderedDict()
        self._buckets = 0
        self._lock = threading.Lock()

    def read(
        self, connection: Connection, sources: SelectedSources, limit_buckets: int
    ) -> list[tuple[str, LayoutOutline]]:
        """(run, outline) by run, module and revision.

        Args:
            connection: To the database.
            sources: The sources.
            limit_buckets: Buckets of a run after which its further layouts are left out.
        """
        layout_keys = keys(connection, sources)
        by_key = self._cached(layout_keys)
        missing = [key for key in layout_keys if key not in by_key]
        for key, body in bodies(connection, missing):
            by_key[key] = self._add(key, _outline(key, body))
        ordered = ((key, by_key[key]) for key in layout_keys if key in by_key)
        return list(_within(ordered, limit_buckets))

    def _cached(self, layout_keys: Sequence[LayoutKey]) -> dict[LayoutKey, LayoutOutline]:
        with self._lock:
            by_key = {key: self._cache[key] for key in layout_keys if key in self._cache}
            for key in by_key:
                self._cache.move_to_end(key)
        return by_key

    def _add(self, key: LayoutKey, outline: LayoutOutline) -> LayoutOutline:
        with self._lock:
            if key not in self._cache:
                self._cache[key] = outline
                self._buckets += 1 + len(outline.size_bytes)
            while self._buckets > _CACHED_BUCKETS:
                self._buckets -= 1 + len(self._cache.popitem(last=False)[1].size_bytes)
        return outline


def _outline(key: LayoutKey, body: str) -> LayoutOutline:
    outline = _decode_outline(body)
    dtypes: dict[str, str] = {}
    return LayoutOutline(
        module=key.module,
        revision=key.revision,
        name=outline.name,
        size_bytes=np.array([bucket.size_bytes for bucket in outline.buckets], np.float64),
        dtypes=tuple(dtypes.setdefault(bucket.dtype, bucket.dtype) for bucket in outline.buckets),
        parameters=np.array([len(bucket.parameters) for bucket in outline.buckets], np.int32),
        titles=_titles(outline.buckets),
    )


def _titles(buckets: Sequence[_Bucket]) -> tuple[str, ...]:
    titles = tuple(unit_title(bucket.kind, bucket.unit) if bucket.unit else "" for bucket in buckets)
    return titles if any(titles) else ()


def _within(
    outlines: Iterable[tuple[LayoutKey, LayoutOutline]], limit_buckets: int
) -> Iterator[tuple[str, LayoutOutline]]:
    buckets: dict[str, int] = {}
    for key, outline in outlines:
        buckets[key.run] = buckets.get(key.run, 0) + len(outline.size_bytes)
        if buckets[key.run] <= limit_buckets:
            yield key.run, outline

"""What the stored metrics of one run are made of: its part of the store's aggregates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpobs_server.metrics.metric import escape
from ddpobs_server.store import Aggregates, BucketRollup, LayoutOutline, PeerTotal, Run


@dataclass(frozen=True)
class BucketTotal:
    """Sums of a bucket over its layouts; `size_bytes` is of the latest."""

    label: str
    compute_ns: int
    comm_ns: int
    exposed_ns: int
    size_bytes: int


@dataclass(frozen=True)
class RunTotals:
    """Sums over a run's latest attempt, as in `store.Aggregates`.

    Attributes:
        phases: Steps, communication and phases, by rank.
        last_seen: Rank, its last step, arrival time of that step, and records dropped.
        reduced_bytes: Rank, and bytes of the buckets that it reduced.
        histogram: Steps under each of `schema.STEP_BOUNDS_S` and above the last; empty without steps.
        facts: Backend, device and version of torch.
    """

    run: Run
    facts: tuple[str, str, str]
    unused: int
    histogram: Sequence[int]
    phases: Mapping[int, tuple[int, ...]]
    last_seen: Sequence[tuple[int, int, int, int]]
    reduced_bytes: Sequence[tuple[int, int]]
    peers: Sequence[PeerTotal]
    buckets: Sequence[BucketTotal]


def totals_by_run(totals: Aggregates) -> Iterator[RunTotals]:
    """The totals of each changed run."""
    last_seen, reduced = defaultdict(list), defaultdict(list)
    peers, buckets = defaultdict(list), defaultdict(list)
    for key, *seen in totals.last_seen:
        last_seen[key].append((seen[0], seen[1], seen[2], seen[3]))
    for key, rank, count in totals.reduced_bytes:
        reduced[key].append((rank, count))
    for key, peer in totals.peers:
        peers[key].append(peer)
    for key, row in totals.buckets:
        buckets[key].append((row, totals.outlines[key, row.module, row.revision]))
    for run in totals.runs:
        if run.run in totals.changed:
            yield RunTotals(
                run=run,
                facts=totals.facts.get(run.run, ("", "", "")),
                unused=totals.unused.get(run.run, 0),
                histogram=totals.histograms.get(run.run, ()),
                phases=totals.phases.get(run.run, {}),
                last_seen=last_seen[run.run],
                reduced_bytes=reduced[run.run],
                peers=peers[run.run],
                buckets=_by_label(buckets[run.run]),
            )


def _by_label(rows: Iterable[tuple[BucketRollup, LayoutOutline]]) -> list[BucketTotal]:
    """Add up the layouts of each bucket. Rows are ordered by revision, so the latest layout's size remains."""
    sums: dict[str, BucketTotal] = {}
    for row, outline in rows:
        label = _label(row, outline)
        before = sums.get(label, BucketTotal(label, 0, 0, 0, 0))
        sums[label] = BucketTotal(
            label,
            before.compute_ns + row.compute_ns,
            before.comm_ns + row.comm_ns,
            before.exposed_ns + row.exposed_ns,
            int(outline.size_bytes[row.bucket]),
        )
    return list(sums.values())


def _label(row: BucketRollup, outline: LayoutOutline) -> str:
    """The number of a bucket, or the name of a unit's collective; of other modules than the first with theirs."""
    name = escape(outline.titles[row.bucket]) if outline.titles else ""
    name = name or str(row.bucket)
    return name if row.module == 0 else f"{row.module}.{name}"

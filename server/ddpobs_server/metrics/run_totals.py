"""What the stored metrics of one run are made of: its part of the store's aggregates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpobs_server.metrics.metric import escape
from ddpobs_server.store import Aggregates, BucketRollup, LastSeen, LayoutOutline, PeerTotals, PhaseSums, Run


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
        reduced_bytes: Bytes of the buckets that each rank reduced.
        histogram: Steps under each of `schema.STEP_BOUNDS_S` and above the last; empty without steps.
        facts: Backend, device and version of torch.
    """

    run: Run
    facts: tuple[str, str, str]
    unused: int
    histogram: Sequence[int]
    phases: PhaseSums
    last_seen: LastSeen
    reduced_bytes: Mapping[int, float]
    peers: PeerTotals
    buckets: Sequence[BucketTotal]


def totals_by_run(totals: Aggregates) -> Iterator[RunTotals]:
    """The totals of each changed run."""
    buckets = defaultdict(list)
    for key, row in totals.buckets:
        buckets[key].append((row, totals.outlines[key, row.module, row.revision]))
    for run in totals.runs:
        if run.run in totals.changed:
            yield RunTotals(
                run=run,
                facts=totals.facts.get(run.run, ("", "", "")),
                unused=totals.unused.get(run.run, 0),
                histogram=totals.histograms.get(run.run, ()),
                phases=totals.phases.get(run.run, PhaseSums()),
                last_seen=totals.last_seen.get(run.run, LastSeen()),
                reduced_bytes=totals.reduced_bytes.get(run.run, {}),
                peers=totals.peers.get(run.run, PeerTotals()),
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

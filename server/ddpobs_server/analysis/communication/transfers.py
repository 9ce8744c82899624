"""Transfers of gradient buckets: the time that each all-reduce moves bytes, without the wait for the last rank.

A rank's span of an all-reduce holds its wait for the last rank to arrive. The last rank waits for none, so its span is
the shortest. Buckets queue behind each other, so a transfer begins when the one before it has ended:

    transfer_i = min over ranks of (done_i - max(launched_i, done_{i-1}))

Source: the split of a collective's time into waiting and moving by TraceLens (https://github.com/AMD-AGI/TraceLens),
here for a queue of transfers. Each rank's times stay on its own clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.evidence import MIN_STEPS, ColumnReader, Evidence
from ddpobs_server.analysis.steps.clock_alignment import collectives_of
from ddpobs_server.analysis.steps.joined_steps import Floats

MAX_SPANS = 100_000
"""Spans that one reading takes, about."""
MAX_RANKS = 16
"""Ranks of one reading: the ranks that arrive last most often."""
BucketSizes = dict[tuple[int, int, int], int]
"""Bytes by module, revision and bucket."""
_INDEX_BITS = 20


@dataclass(frozen=True)
class Transfers:
    """All-reduces of buckets that every examined rank recorded, in the order of the steps and of their completion.

    Attributes:
        step: Step on the first rank, shape [transfers].
        module: Shape [transfers].
        revision: Shape [transfers].
        bucket: Shape [transfers].
        size_bytes: Shape [transfers].
        moving_ns: Time without waiting, shape [transfers].
        waiting_ns: Time that each rank waits for the last rank, shape [transfers, ranks].
        ready_ns: Readiness since the step's first readiness on that rank, the latest over ranks, shape [transfers].
        done_ns: Completion since then, the earliest over ranks, shape [transfers].
        exposed_ns: Time of the transfer's step from the last readiness to the last completion, without waiting,
            shape [transfers].
    """

    step: wire.Ints
    module: wire.Ints
    revision: wire.Ints
    bucket: wire.Ints
    size_bytes: wire.Ints
    moving_ns: Floats
    waiting_ns: Floats
    ready_ns: Floats
    done_ns: Floats
    exposed_ns: Floats
    row: wire.Ints

    def __len__(self) -> int:
        return len(self.step)

    def select(self, rows: wire.Ints | npt.NDArray[np.bool_]) -> Transfers:
        """Return only these rows."""
        return Transfers(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(np.unique(self.step))

    @property
    def bytes_a_step(self) -> float:
        """Mean size of a step's transfers."""
        return float(self.size_bytes.sum()) / max(1, self.steps)

    @property
    def bytes_per_ns(self) -> float:
        """Achieved bandwidth, without waiting; in GB/s."""
        return float(self.size_bytes.sum()) / max(1.0, float(self.moving_ns.sum()))

    def by_step(self, values: Floats | wire.Ints) -> Floats:
        """Sum these values over each step's transfers; shape [steps]."""
        _, index = np.unique(self.step, return_inverse=True)
        return np.asarray(np.bincount(index, values), np.float64)

    @property
    def exposed_by_step_ns(self) -> Floats:
        """Exposed time without waiting, shape [steps]."""
        return self.exposed_ns[np.unique(self.step, return_index=True)[1]]

    @property
    def rows_of_steps(self) -> wire.Ints:
        """Row of each bucket of each step, shape [steps, buckets]; steps that lack a bucket are left out.

        Buckets are in launch order, which their readiness tells where there are several modules.
        """
        _, column = np.unique(np.stack([self.module, self.bucket]), axis=1, return_inverse=True)
        column = column.reshape(-1)
        order = np.lexsort((column, self.step))
        begins = np.flatnonzero(np.diff(self.step[order], prepend=-1))
        buckets = int(column.max(initial=-1)) + 1
        whole = begins[np.diff(begins, append=len(order)) == buckets]
        rows: wire.Ints = order[whole[:, None] + np.arange(buckets)]
        if not len(rows) or not self.module.any():
            return rows
        return np.asarray(rows[:, np.argsort(np.median(self.ready_ns[rows], axis=0), kind="stable")])

    @property
    def latest_layout(self) -> Transfers:
        """Transfers of each module's latest buckets: buckets are rebuilt after the first step."""
        latest = np.full(int(self.module.max(initial=0)) + 1, wire.UNKNOWN, np.int64)
        np.maximum.at(latest, self.module, self.revision)
        return self.select(self.revision == latest[self.module])


def latest_transfers(evidence: Evidence, columns: ColumnReader) -> Transfers:
    """Return the transfers of the latest buckets in the judged steps; they are read once for all findings.

    Raises:
        ColumnsTooLargeError: The spans have too many rows.
    """
    if "transfers" not in evidence.shared:
        rows = np.arange(len(evidence.joined))
        evidence.shared["transfers"] = read_transfers(evidence, columns, rows).latest_layout
    result: Transfers = evidence.shared["transfers"]
    return result


def read_transfers(evidence: Evidence, columns: ColumnReader, rows: wire.Ints) -> Transfers:
    """Read the transfers of these steps; arguments and errors as of `read_spans`."""
    spans, collective, sizes = read_spans(evidence, columns, rows)
    return transfers(spans, collective, sizes)


def read_spans(
    evidence: Evidence, columns: ColumnReader, rows: wire.Ints
) -> tuple[tuple[wire.Ints, wire.Spans], wire.Ints, BucketSizes]:
    """Read the spans of these steps on the ranks that arrive last most often: what `transfers` takes.

    Args:
        evidence: The run.
        columns: Reads spans.
        rows: Indices into `evidence.joined`, in rising order; the latest are read if there are too many.

    Raises:
        ColumnsTooLargeError: The spans have too many rows.
    """
    joined = evidence.joined
    sizes = bucket_sizes(columns.layouts())
    ranks = late_ranks(joined.own_ns[rows], joined.ranks)
    rows = rows[-max(MIN_STEPS, MAX_SPANS // max(1, len(sizes) * len(ranks))) :]
    selected = np.isin(evidence.rank, ranks) & np.isin(evidence.steps.collective, joined.collective[rows])
    steps = evidence.rank[selected], evidence.steps.select(selected)
    # With uneven inputs the ranks' step numbers part: ranks with the same range of steps are read together.
    ranges: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        numbers = steps[1].step[steps[0] == rank]
        if len(numbers):
            ranges.setdefault((int(numbers.min()), int(numbers.max())), []).append(rank)
    parts = [columns.spans(of_range, first, last) for (first, last), of_range in ranges.items()]
    parts = parts or [(np.zeros(0, np.int64), wire.Spans.from_table(np.zeros((len(wire.Spans.names), 0), np.int64)))]
    span_rank, spans = np.concatenate([part[0] for part in parts]), wire.Spans.concat([part[1] for part in parts])
    return (span_rank, spans), collectives_of(steps, span_rank, spans.step), sizes


def late_ranks(own_ns: Floats, ranks: wire.Ints) -> list[int]:
    """Return the ranks that are last most often, at most `MAX_RANKS`, in rising order."""
    last = np.bincount(own_ns.argmax(axis=1), minlength=len(ranks)) if len(own_ns) else np.zeros(len(ranks))
    return sorted(ranks[np.argsort(-last, kind="stable")[:MAX_RANKS]].tolist())


def bucket_sizes(layouts: list[wire.Layout]) -> BucketSizes:
    """Return the size of each bucket in bytes, by module, revision and bucket."""
    return {
        (layout.module, layout.revision, index): bucket.size_bytes
        for layout in layouts
        for index, bucket in enumerate(layout.buckets)
    }


def transfers(spans: tuple[wire.Ints, wire.Spans], collective: wire.Ints, sizes: BucketSizes) -> Transfers:
    """Join the ranks' spans, and compute each transfer.

    Left out are buckets without a known size, buckets that a rank has not recorded, and buckets that a step reduces
    several times.

    Args:
        spans: Rank of each row, and columns.
        collective: Collective of the row's step; negative for rows that are left out, shape [rows].
        sizes: The buckets.
    """
    rank, columns = spans
    keys = (columns.module << _INDEX_BITS | columns.revision) << _INDEX_BITS | columns.bucket
    distinct, first, key_index = np.unique(keys, return_index=True, return_inverse=True)
    identity = zip(columns.module[first], columns.revision[first], columns.bucket[first], strict=True)
    recorded = [sizes.get((int(module), int(revision), int(bucket)), 0) for module, revision, bucket in identity]
    size = np.array(recorded, np.int64)[key_index] if len(distinct) else keys
    usable = np.flatnonzero((collective >= 0) & (size > 0))
    order = usable[np.lexsort((rank[usable], keys[usable], collective[usable]))]
    begins = np.flatnonzero((np.diff(collective[order], prepend=-1) != 0) | (np.diff(keys[order], prepend=-1) != 0))
    if not len(order):
        return _measure(columns, collective[:0], size, np.zeros((0, 1), np.int64))
    ranks = np.unique(rank[order])
    counts = np.diff(begins, append=len(order))
    table = order[begins[counts == len(ranks)][:, None] + np.arange(len(ranks))]
    table = table[(rank[table] == ranks).all(axis=1)]
    return _measure(columns, collective[table[:, :1]].reshape(-1), size, table)


def _measure(columns: wire.Spans, collective: wire.Ints, size: wire.Ints, table: wire.Ints) -> Transfers:
    """Compute each transfer from the rows of all ranks, shape [transfers, ranks]."""
    busy_ns, ready_ns, ended_ns, exposed_ns = (np.zeros(table.shape) for _ in range(4))
    for index in range(table.shape[1] if len(table) else 0):
        rows = table[:, index]
        order = np.lexsort((columns.done_ns[rows], collective))
        rows = rows[order]
        first = np.flatnonzero(np.diff(collective[order], prepend=-1))
        counts = np.diff(first, append=len(order))
        ready, done_ns = columns.ready_ns[rows], columns.done_ns[rows]
        previous_ns = np.append(0, done_ns)[:-1]
        previous_ns[first] = columns.launched_ns[rows[first]]
        begun_ns = np.maximum(columns.launched_ns[rows], columns.started_ns[rows])
        busy_ns[order, index] = np.maximum(0, done_ns - np.maximum(begun_ns, previous_ns))
        origin_ns = np.repeat(np.minimum.reduceat(ready, first), counts)
        ready_ns[order, index] = ready - origin_ns
        ended_ns[order, index] = done_ns - origin_ns
        after_ns = np.maximum.reduceat(done_ns, first) - np.maximum.reduceat(ready, first)
        exposed_ns[order, index] = np.repeat(np.maximum(0, after_ns), counts)
    moving_ns = busy_ns.min(axis=1, initial=np.inf)
    rows = table[:, 0]
    return Transfers(
        step=columns.step[rows],
        module=columns.module[rows],
        revision=columns.revision[rows],
        bucket=columns.bucket[rows],
        size_bytes=size[rows],
        moving_ns=moving_ns,
        waiting_ns=busy_ns - moving_ns[:, None],
        ready_ns=ready_ns.max(axis=1, initial=0.0),
        done_ns=ended_ns.min(axis=1, initial=np.inf),
        exposed_ns=exposed_ns.min(axis=1, initial=np.inf),
        row=table,
    ).select(np.lexsort((columns.done_ns[rows], collective)))

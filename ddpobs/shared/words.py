"""Words for ranks, buckets and findings: whatever prints them, prints them alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddpobs.wire.schema import Bucket

_UNIT_COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_again": "all-gather in backward",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce over replicas",
    "all_gather_updated": "all-gather after the optimizer",
    "all_to_all": "all-to-all",
}


class Parts(NamedTuple):
    """What the rows of a layout are called.

    Attributes:
        heading: Above all of them.
        noun: What one of them is of.
        row: One of them, where they are counted.
    """

    heading: str
    noun: str
    row: str


BUCKETS, UNITS = Parts("Buckets", "bucket", "bucket"), Parts("Units", "unit", "collective")
MAX_NAMED_RANKS = 8
MAX_NAMED_PARAMETERS = 3
LABELS = {
    "measure": "measure",
    "when": "when",
    "cause": "cause",
    "where": "where",
    "remedy": "do",
    "gain": "saves",
}
"""The parts of a finding below its verdict, in their order, and the label of each."""
STATED_ELSEWHERE = ("scaling-loss",)
"""Codes of findings that are no card: the account states what they state."""
LABEL_COLUMNS = 1 + max(map(len, LABELS.values()))


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 1`, `ranks 0, 2 and 3`, `ranks 0, 1, … and 57 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MAX_NAMED_RANKS:
        return f"ranks {', '.join(map(str, ranks[:MAX_NAMED_RANKS]))} and {len(ranks) - MAX_NAMED_RANKS} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def bucket_name(module: int, bucket: int) -> str:
    """A bucket as `MODULE.BUCKET`."""
    return f"{module}.{bucket}"


def bucket_title(module: int, index: int, bucket: Bucket | None = None) -> str:
    """A bucket, `bucket 0.2`, or a collective of a fully sharded unit, `reduce-scatter of unit blocks.3`.

    Args:
        module: Number of the module.
        index: Index in the module's layout.
        bucket: What the layout has there; None if it is not known.
    """
    if bucket is None or not bucket.unit:
        return f"bucket {bucket_name(module, index)}"
    return unit_title(bucket.kind, bucket.unit)


def unit_title(kind: str, unit: str) -> str:
    """A collective of a fully sharded unit, `reduce-scatter of unit blocks.3`; `kind` is one of `wire.UNIT_KINDS`."""
    return f"{collective_title(kind)} of unit {unit}"


def collective_title(kind: str) -> str:
    """A collective of units, `all-gather in backward`; `kind` is one of `wire.UNIT_KINDS`."""
    return _UNIT_COLLECTIVES.get(kind, kind)


def bucket_phrase(module: int, index: int, bucket: Bucket | None = None) -> str:
    """The same within a sentence: `bucket 0.2`, or `the reduce-scatter of unit blocks.3`."""
    article = "the " if bucket is not None and bucket.unit else ""
    return article + bucket_title(module, index, bucket)


def parts_of(buckets: Iterable[Bucket]) -> Parts:
    """What these rows of layouts are called: buckets, or units if a model is fully sharded."""
    return UNITS if any(bucket.unit for bucket in buckets) else BUCKETS


def format_bucket(module: int, index: int, bucket: Bucket | None = None) -> str:
    """The same with its first parameters: `bucket 0.2: decoder.4.weight, decoder.4.bias, …`."""
    title = bucket_title(module, index, bucket)
    if bucket is None or not bucket.parameters:
        return title
    names = [parameter.name for parameter in bucket.parameters[:MAX_NAMED_PARAMETERS]]
    return f"{title}: {', '.join(names)}{', …' if len(bucket.parameters) > MAX_NAMED_PARAMETERS else ''}"


def fact_text(value: object) -> str:
    """A setting or another fact of a run in words: `yes` for True, four digits of a number, `none` for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(share: float, digits: int = 0) -> str:
    """A share as a percentage: `37 %`."""
    return f"{100 * share:.{digits}f} %"


def own_cost_text(cost: Mapping[str, Any]) -> str:
    """The cost of telemetry of the REST API in words: `telemetry adds 0.6 % (0.3 to 0.9 %) to a step`."""
    value, low, high = (100 * cost[name] for name in ("cost_ratio", "low_ratio", "high_ratio"))
    return f"telemetry adds {value:.1f} % ({low:.1f} to {high:.1f} %) to a step; from {cost['rests']} rests"


def shown_findings(diagnosis: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The findings of a diagnosis of the REST API that are shown as such."""
    return [finding for finding in diagnosis["findings"] if finding["code"] not in STATED_ELSEWHERE]


def finding_heading(finding: Mapping[str, Any]) -> str:
    """Severity and verdict of a finding of the REST API: `critical: Rank 1 is slow in backward`."""
    return f"{finding['severity']}: {finding['verdict']}"


def finding_parts(finding: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a finding of the REST API below its verdict, by name and in their order, without the empty ones."""
    gain = finding.get("gain")
    parts = {**finding, "gain": gain["text"] if gain else ""}
    return {part: parts[part] for part in LABELS if parts.get(part)}


def finding_lines(finding: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The same parts, each with its label."""
    return [(LABELS[part], text) for part, text in finding_parts(finding).items()]


def labelled(label: str, text: str) -> str:
    """A line of a terminal, with the label in a column of its own."""
    return f"{label:{LABEL_COLUMNS}}{text}"

"""A metric of runs as one row: its name, its help text, its labels, and its values.

No metric has both a rank and a bucket label: there would be too many series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from typing_extensions import override

END = b"# EOF\n"
"""Last line of OpenMetrics; it must appear once, after all families."""
Render = Callable[[CollectorRegistry], bytes]
Families = dict[str, bytes]
"""Lines of a run by metric."""
Source = TypeVar("Source")
RankSeries = tuple[str, tuple[int, ...], tuple[float, ...]]
"""Further labels as text, ranks, and a value of each rank."""
Block = tuple[str, str, tuple[int, ...], tuple[float, ...]]
"""Name of a metric, further labels as text, some ranks, and their values."""
_BLOCK_RANKS = 64
_LABEL_CHARACTERS = 128
"""Maximum characters of a label's value that a client chose."""


class BlockTexts:
    """Texts of the ranks of a run from one scrape to the next: a block with the same values keeps its text.

    Args:
        before: Texts of the scrape before.
    """

    def __init__(self, before: Mapping[Block, bytes]) -> None:
        self._before = before
        self.kept: dict[Block, bytes] = {}

    def text(self, block: Block, make: Callable[[Block], bytes], *, keep: bool) -> bytes:
        """Return a block's text, which `make` returns if there is none. Keep it for the next scrape on demand."""
        text = self._before.get(block) or make(block)
        if keep:
            self.kept[block] = text
        return text


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """One row of the table of metrics.

    Attributes:
        name: Without the prefix `ddpobs_` and without a counter's suffix.
        help: What it measures.
        labels: In alphabetical order, as prometheus_client writes them; each metric has the label `run` besides.
        values: Each series of a run: the escaped labels in this order, and the sample.
        kind: Type of the family.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[Source], Iterable[tuple[object, ...]]]
    kind: type[Family] = CounterMetricFamily

    @cached_property
    def _all_labels(self) -> tuple[str, ...]:
        return tuple(sorted((*self.labels, "run")))

    @property
    def _suffix(self) -> str:
        return "_total" if self.kind is CounterMetricFamily else ""

    def lines(self, run: str, source: Source, texts: BlockTexts) -> bytes:
        """The series of a run. prometheus_client takes ten times as long to format a line.

        Args:
            run: Name of the run.
            source: What the values are made of.
            texts: Texts of ranks whose values may not have changed.
        """
        pairs = ",".join(f'{label}="{run if label == "run" else "%s"}"' for label in self._all_labels)
        line = f"ddpobs_{self.name}{self._suffix}{{{pairs}}} %r\n"
        return "".join(map(line.__mod__, self.values(source))).encode()

    def header(self, render: Render) -> bytes:
        """Help and type in the requested format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_SingleFamily(self.kind(f"ddpobs_{self.name}", self.help, labels=self._all_labels)))  # type: ignore[call-arg]
        return render(registry).removesuffix(END)


@dataclass(frozen=True)
class RankMetric(Metric[Source]):
    """A metric with a series for each rank. Its values are `RankSeries`.

    Attributes:
        sample: The sample of a value.
    """

    values: Callable[[Source], Iterable[RankSeries]]
    sample: Callable[[float], float] = int

    @override
    def lines(self, run: str, source: Source, texts: BlockTexts) -> bytes:
        """The series of a run. Of a run with many ranks only the blocks whose values have changed are formatted."""
        blocks = []
        for labels, ranks, values in self.values(source):
            for first in range(0, len(ranks), _BLOCK_RANKS):
                block = (self.name, labels, ranks[first : first + _BLOCK_RANKS], values[first : first + _BLOCK_RANKS])
                blocks.append(texts.text(block, partial(self._text, run), keep=len(ranks) > _BLOCK_RANKS))
        return b"".join(blocks)

    def _text(self, run: str, block: Block) -> bytes:
        _, labels, ranks, values = block
        begin, end = f'ddpobs_{self.name}{self._suffix}{{{labels}rank="', f'",run="{run}"}} '
        samples = zip(ranks, map(self.sample, values), strict=True)
        return "".join([f"{begin}{rank}{end}{sample!r}\n" for rank, sample in samples]).encode()


class Histogram(Metric[Source]):
    """A metric whose values are (suffix, labels, sample) of its series."""

    @override
    def lines(self, run: str, source: Source, texts: BlockTexts) -> bytes:
        """The series of a run."""
        rows = self.values(source)
        return "".join(
            f'ddpobs_{self.name}{end}{{{pairs}run="{run}"}} {value!r}\n' for end, pairs, value in rows
        ).encode()


def gauge(
    name: str, text: str, labels: tuple[str, ...], values: Callable[[Source], Iterable[tuple[object, ...]]]
) -> Metric[Source]:
    """A row of a gauge."""
    return Metric(name, text, labels, values, GaugeMetricFamily)


def histogram(name: str, text: str, values: Callable[[Source], Iterable[tuple[object, ...]]]) -> Metric[Source]:
    """A row of a histogram."""
    return Histogram(name, text, (), values, HistogramMetricFamily)


def escape(text: str, characters: int = _LABEL_CHARACTERS) -> str:
    """Shorten and escape a label's value for the exposition formats."""
    return text[:characters].replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class _SingleFamily(Collector):
    def __init__(self, family: Family) -> None:
        self._family = family

    @override
    def collect(self) -> Iterable[Family]:
        return [self._family]

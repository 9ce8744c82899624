"""The result of a check of the hosts, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from ddpobs.launch.host_check.comparison import CONSISTENT, Comparison, Floats, compare
from ddpobs.launch.host_check.order import ALL_REDUCE, MATRIX, MEASURES, SLOW_HOST
from ddpobs.launch.host_check.partners import MIN_GROUPS, groups_of
from ddpobs.shared.quantities import counted, size_text, three_digits
from ddpobs.shared.words import format_ranks, percent
from ddpobs.wire import printable

_HEADS = ("measure", "median rank", "slowest", "", "ratio", "slow in")


@dataclass(frozen=True)
class Result:
    """Rates of all ranks.

    Attributes:
        hosts: Host of each rank.
        rates: Rate of each measure, rank and repetition, shape [measures, ranks, repetitions], in operations or bytes
            a second; NaN where it is not known.
        limit: Ratio from which on a rank is slower.
        failures: Rank, measure and reason of rates that are not known.
        device: Where the ranks computed.
        seconds: Duration of the check.
    """

    hosts: list[str]
    rates: Floats
    limit: float
    failures: list[tuple[int, str, str]]
    device: str
    seconds: float

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The comparison of each measure."""
        return [compare(rates, self.hosts, self.limit) for rates in self.rates]

    def slow_hosts(self) -> list[str]:
        """The hosts with a slow rank. An all-reduce takes equally long on all ranks, and names none."""
        judged = [comparison for measure, comparison in enumerate(self.comparisons) if measure != ALL_REDUCE]
        return list(dict.fromkeys(self.hosts[rank] for comparison in judged for rank in comparison.slow))

    def lines(self, history: Sequence[str] = ()) -> list[str]:
        """The table, each slow host with its measures, what is not known, and lines of the hosts' history."""
        ranks, hosts = counted(len(self.hosts), "rank"), counted(len(set(self.hosts)), "host")
        repetitions = counted(self.rates.shape[2], "repetition")
        checked = f"checked {ranks} on {hosts} in {self.seconds:.0f} s, on {self.device}, with {repetitions}"
        lines = [f"ddpobs: {checked}", *_aligned([_HEADS, *map(self._row, range(len(MEASURES)))])]
        slow = [self._sentence(host, measure) for host in self.slow_hosts() for measure in self._measures_of(host)]
        lines += [f"ddpobs: {line}" for line in (slow or [self._alike()])]
        lines += [f"ddpobs: not known: {reason}" for reason in self._missing()]
        lines += [f"ddpobs: {line}" for line in history]
        if slow:
            lines.append(f"ddpobs: the script was not started: exit status {SLOW_HOST}")
        return [printable(line) for line in lines]

    def _row(self, measure: int) -> tuple[str, ...]:
        comparison, rate = self.comparisons[measure], partial(rate_text, measure)
        if comparison.slowest is None:
            return MEASURES[measure], "not known", "", "", "", ""
        middle, slowest = rate(float(np.nanmedian(comparison.rates))), comparison.slowest
        if measure == ALL_REDUCE:
            return MEASURES[measure], middle, "", "equal on all ranks", "", ""
        return (
            MEASURES[measure],
            middle,
            rate(float(comparison.rates[slowest])),
            f"rank {slowest} on {self.hosts[slowest]}",
            f"{comparison.ratios[slowest]:.2f}",
            f"{comparison.slower[slowest]} of {self.rates.shape[2]}",
        )

    def _measures_of(self, host: str) -> list[int]:
        return [
            measure
            for measure in range(ALL_REDUCE)
            if any(self.hosts[rank] == host for rank in self.comparisons[measure].slow)
        ]

    def _sentence(self, host: str, measure: int) -> str:
        comparison = self.comparisons[measure]
        ranks = [rank for rank in comparison.slow if self.hosts[rank] == host]
        slowest = ranks[0]
        own, others = rate_text(measure, comparison.rates[slowest]), rate_text(measure, comparison.others[slowest])
        than = "the other hosts" if len(set(self.hosts)) > 1 else "the other ranks"
        times = f"{comparison.slower[slowest]} of {counted(self.rates.shape[2], 'repetition')}"
        return (
            f"slow host {host}: {MEASURES[measure]} slower by {comparison.ratios[slowest]:.2f}× than on {than} "
            f"({format_ranks(sorted(ranks))}: {own}, others: {others}; at least {self.limit:g}× in {times})"
        )

    def _alike(self) -> str:
        return f"hosts are alike: none is slower by {self.limit:g}× in {percent(CONSISTENT)} of the repetitions"

    def _missing(self) -> list[str]:
        missing = [f"{measure} of rank {rank}: {reason}" for rank, measure, reason in self.failures]
        if (groups := len(set(groups_of(self.hosts)))) < MIN_GROUPS:
            kind = "hosts" if len(set(self.hosts)) > 1 else "ranks"
            missing.append(f"which of the {groups} {kind} delays the exchange: each has the other as its only partner")
        return missing


def rate_text(measure: int, value: float) -> str:
    """A rate of a measure with its unit."""
    if measure != MATRIX:
        return f"{size_text(value)}/s"
    unit, size = ("TFLOP/s", 1e12) if value >= 1e12 else ("GFLOP/s", 1e9)
    return f"{three_digits(value / size)} {unit}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

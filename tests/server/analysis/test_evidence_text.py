"""Evidence in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs_server.analysis.evidence_text import evidence_sentences
from ddpobs_server.analysis.finding import Facts
from ddpobs_server.analysis.findings.registry import FACTS


@dataclass(frozen=True)
class _Facts(Facts):
    """Figures.

    Attributes:
        excess_ns: Delay in the late steps: the median.
        late_share: Share of the steps; None if it is not known.
        own_ns: Median own time by rank.
        cause_ns: Delay by cause.
        count: Number of
            steps.
        none_ns: Nothing.
        size_bytes: Size.
        names: Names.
        flag: Whether it is so.
        host: The host.
    """

    excess_ns: int
    late_share: float | None
    own_ns: dict[int, int]
    cause_ns: dict[str, int]
    count: int
    none_ns: int
    size_bytes: int
    names: list[str]
    flag: bool
    host: str


def test_a_figure_is_its_meaning_and_its_value_with_a_unit_and_zeros_are_left_out() -> None:
    own = dict.fromkeys(range(10), 10**6)
    facts = _Facts(3 * 10**7, 0.894, own, {"run_delay_ns": 10**6, "gc": 0}, 2000, 0, 25_000_000, ["a", "b"], True, "h")
    ranks = ", ".join(f"rank {rank} 1 ms" for rank in range(8))
    assert evidence_sentences(facts) == [
        "Delay in the late steps: 30 ms.",
        "Share of the steps: 89 %.",
        f"Median own time by rank: {ranks} and 2 more.",
        "Delay by cause: run delay 1 ms.",
        "Number of steps: 2,000.",
        "Size: 25 MB.",
        "Names: a, b.",
        "Whether it is so: yes.",
    ]


def test_an_excess_below_zero_is_left_out() -> None:
    facts = _Facts(-407, None, {0: -2}, {}, 0, 0, 0, [], False, "")
    assert evidence_sentences(facts) == ["Median own time by rank: rank 0 -2 ns."]


def test_every_fact_of_the_findings_has_a_meaning() -> None:
    for facts in FACTS:
        assert "Attributes:" in (facts.__doc__ or ""), facts

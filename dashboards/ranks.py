"""The dashboard of a run's ranks: delay caused and suffered, and their phases side by side."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, RANK, TOP, Row, heat, lines, of_runs, over_range, stacked, top
from dashboards.tables import phases_of_ranks

LEGEND = "{{run}}, rank {{rank}}"
_BY, _OWN = "run, rank", ',phase!="exposed_comm"'
_DELAY = (
    f"sum by ({_BY}) (rate(ddpobs_rank_delay_seconds_total{{{RANK}}}[$__range] @ end()) "
    f"or rate(ddpobs_steps_total{{{RANK}}}[$__range] @ end()) * 0)"
)
"""Ranks by the delay that they cause in the time range; ranks that are not compared last."""


def ranks() -> dashboard.Dashboard:
    """Return the dashboard."""
    return of_runs("ddpobs: ranks", "ddpobs-ranks", "Which rank the others wait for, and why.", _rows(), ranks=True)


def _rows() -> list[Row]:
    delay, wait = (_per_compared_step(f"ddpobs_{name}_seconds_total") for name in ("rank_delay", "comm_wait"))
    late = (
        f"sum by (run, rank, phase) (rate(ddpobs_straggler_steps_total{{{RANK}}}[{OVER}])) "
        "/ on (run, rank) group_left () "
        f"sum by (run, rank) (rate(ddpobs_compared_steps_total{{{RANK}}}[{OVER}])) > 0 "
        f"or sum by (run, rank, phase) (increase(ddpobs_straggler_steps_total{{{RANK}}}[{OVER}])) * 0"
    )
    by_phase = "run, rank, phase"
    last_step = f"ddpobs_last_step_timestamp_seconds{{{RANK}}}"
    parts = (
        f"{_mean('phase', by_phase, 'steps', more=_OWN)} or "
        f'label_replace({_mean("comm_wait", _BY, "compared_steps")}, "phase", "waiting", "", "") or '
        f'label_replace({_mean("comm_moving", _BY, "compared_steps")}, "phase", "exposed_comm", "", "")'
    )
    return [
        (
            f"The {TOP} ranks that delay the others most",
            [
                heat(
                    "Share of time lost to a rank, over time",
                    _most(f"rate(ddpobs_rank_delay_seconds_total{{{RANK}}}[{OVER}])"),
                    LEGEND,
                    "percentunit",
                    "Seconds of delay that a rank caused, per second. All green is good. A red row is a slow "
                    "rank; red cells that move from row to row are noise or a shared cause.",
                    bounds=(0.1, 0.25),
                ),
                lines(
                    "Delay caused by a rank, per step",
                    [(_most(delay), LEGEND)],
                    "s",
                    "How long the others waited for this rank. One line above the others is the slow rank.",
                ),
                lines(
                    "Waiting for the last rank, per step",
                    [(_most(wait), LEGEND)],
                    "s",
                    "How long this rank waited for the last one. The slow rank is the one that does not wait.",
                ),
                phases_of_ranks(f'label_join({_most(parts)}, "line", ", rank ", "run", "rank")'),
                stacked(
                    "Share of steps in which a rank was last and late",
                    top(late, by_phase, over_range("ddpobs_straggler_steps_total", RANK, by_phase)),
                    LEGEND + ", {{phase}}",
                    "percentunit",
                    "Late by more than a tenth of the step, with the phase that explains it. Near zero, or "
                    "even over the ranks, is good.",
                ),
                lines(
                    "Seconds since a rank's last step",
                    [(top(f"time() - {last_step}", _BY, f"time() - {last_step} @ end()"), LEGEND)],
                    "s",
                    "The ranks with the oldest step. A few seconds are normal. All ranks rising together: a hang or a "
                    "long pause. One alone: its telemetry stopped.",
                    bounds=(60, 180),
                ),
            ],
        ),
        (
            "Communication",
            [
                lines(
                    "Communication, per step",
                    [
                        (_most(_per_step("ddpobs_comm_seconds_total"), TOP // 2), LEGEND),
                        (_most(_per_step("ddpobs_comm_exposed_seconds_total"), TOP // 2), LEGEND + ", exposed"),
                    ],
                    "s",
                    "Time with communication in progress, and the part that backward did not hide. A small "
                    "exposed part is good.",
                ),
                lines(
                    "Gradient bytes a second",
                    [(_most(f"rate(ddpobs_allreduce_bytes_total{{{RANK}}}[{OVER}])"), LEGEND)],
                    "Bps",
                    "Gradients reduced. It follows the pace of steps; all ranks should be equal.",
                ),
            ],
        ),
    ]


def _most(expr: str, count: int = TOP) -> str:
    return top(expr, _BY, _DELAY, count)


def _mean(seconds: str, by: str, steps: str, more: str = "") -> str:
    """Mean time per step over the time range, by labels."""
    times = f"sum by ({by}) (rate(ddpobs_{seconds}_seconds_total{{{RANK}{more}}}[$__range]))"
    return f"{times} / on ({_BY}) group_left () sum by ({_BY}) (rate(ddpobs_{steps}_total{{{RANK}}}[$__range]))"


def _per_step(metric: str, steps: str = "ddpobs_steps_total") -> str:
    return f"rate({metric}{{{RANK}}}[{OVER}]) / rate({steps}{{{RANK}}}[{OVER}])"


def _per_compared_step(metric: str) -> str:
    return _per_step(metric, "ddpobs_compared_steps_total")

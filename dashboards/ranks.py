"""The dashboard of a run's ranks: delay caused and suffered, and their phases side by side."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, RANK, Row, heat, lines, of_runs, stacked
from ddpobs.wire import PHASES

LEGEND = "{{run}}, rank {{rank}}"


def ranks() -> dashboard.Dashboard:
    """Return the dashboard."""
    return of_runs("ddpobs: ranks", "ddpobs-ranks", "Which rank the others wait for, and why.", _rows(), ranks=True)


def _rows() -> list[Row]:
    delay, wait = (_per_compared_step(f"ddpobs_{name}_seconds_total") for name in ("rank_delay", "comm_wait"))
    return [
        (
            "The slow rank",
            [
                heat(
                    "Share of time lost to a rank, over time",
                    f"rate(ddpobs_rank_delay_seconds_total{{{RANK}}}[{OVER}])",
                    LEGEND,
                    "percentunit",
                    "Seconds of delay that a rank caused, per second. All green is good. A red row is a slow "
                    "rank; red cells "
                    "that move from row to row are noise or a shared cause.",
                    bounds=(0.1, 0.25),
                ),
                lines(
                    "Delay caused by a rank, per step",
                    [(delay, LEGEND)],
                    "s",
                    "How long the others waited for this rank. One line above the others is the slow rank.",
                ),
                lines(
                    "Waiting for the last rank, per step",
                    [(wait, LEGEND)],
                    "s",
                    "How long this rank waited for the last one. The slow rank is the one that does not wait.",
                ),
                stacked(
                    "Share of steps in which a rank was last and late",
                    f"sum by (run, rank, phase) (rate(ddpobs_straggler_steps_total{{{RANK}}}[{OVER}])) "
                    "/ on (run, rank) group_left () "
                    f"sum by (run, rank) (rate(ddpobs_compared_steps_total{{{RANK}}}[{OVER}])) > 0 "
                    f"or sum by (run, rank, phase) (increase(ddpobs_straggler_steps_total{{{RANK}}}[{OVER}])) * 0",
                    LEGEND + ", {{phase}}",
                    "percentunit",
                    "Late by more than a tenth of the step, with the phase that explains it. Near zero, or "
                    "even over the ranks, "
                    "is good.",
                ),
                lines(
                    "Seconds since a rank's last step",
                    [(f"time() - ddpobs_last_step_timestamp_seconds{{{RANK}}}", LEGEND)],
                    "s",
                    "A few seconds are normal. All ranks rising together: a hang or a long pause. One alone: "
                    "its telemetry stopped.",
                    bounds=(60, 180),
                ),
            ],
        ),
        (
            "Phases side by side",
            [
                lines(
                    f"Time in {phase.replace('_', ' ')}, per step",
                    [
                        (
                            f'rate(ddpobs_phase_seconds_total{{{RANK},phase="{phase}"}}[{OVER}]) / ignoring (phase) '
                            f"rate(ddpobs_steps_total{{{RANK}}}[{OVER}])",
                            LEGEND,
                        )
                    ],
                    "s",
                    "Equal lines are good. " + _MEANING.get(phase, "A line above the others is a slow rank."),
                )
                for phase in PHASES
            ],
        ),
        (
            "Communication",
            [
                lines(
                    "Communication, per step",
                    [
                        (_per_step("ddpobs_comm_seconds_total"), LEGEND),
                        (_per_step("ddpobs_comm_exposed_seconds_total"), LEGEND + ", exposed"),
                    ],
                    "s",
                    "Time with communication in progress, and the part that backward did not hide. A small "
                    "exposed part is good.",
                ),
                lines(
                    "Gradient bytes a second",
                    [(f"rate(ddpobs_allreduce_bytes_total{{{RANK}}}[{OVER}])", LEGEND)],
                    "Bps",
                    "Gradients reduced. It follows the pace of steps; all ranks should be equal.",
                ),
            ],
        ),
    ]


_MEANING = {"exposed_comm": "A line below the others is the slow rank: it does not wait for the rest."}


def _per_step(metric: str, steps: str = "ddpobs_steps_total") -> str:
    return f"rate({metric}{{{RANK}}}[{OVER}]) / rate({steps}{{{RANK}}}[{OVER}])"


def _per_compared_step(metric: str) -> str:
    return _per_step(metric, "ddpobs_compared_steps_total")

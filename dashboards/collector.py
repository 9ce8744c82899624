"""The collector itself: health, ingest, latency, what is refused."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, Row, board, lines, number, stacked, variable

OF = 'instance=~"$instance"'
NAMED = "{{instance}}"


def collector() -> dashboard.Dashboard:
    """Built from rows; an alert of `alerts.yml` has its panel here."""
    return board(
        "ddpobs: collector",
        "ddpobs-collector",
        "Health of the collectors, ingest, latency, and what they refuse.",
        [variable("instance", "label_values(ddpobs_server_info, instance)", many=True)],
        _rows(),
    )


def _rows() -> list[Row]:
    return [
        (
            "Health",
            [
                number("Database", f"ddpobs_server_database_up{{{OF}}}", "bool_yes_no", 4, NAMED),
                number("Writer", f"ddpobs_server_writer_alive{{{OF}}}", "bool_yes_no", 4, NAMED),
                number("Up for", f"time() - process_start_time_seconds{{{OF}}}", "s", 4, NAMED),
                number("Disk free", f'ddpobs_server_disk_bytes{{{OF},what="free"}}', "bytes", 4, NAMED),
                number("Store", f"ddpobs_server_store_bytes{{{OF}}}", "bytes", 4, NAMED),
                number("Version", f"ddpobs_server_info{{{OF}}}", "short", 4, "{{version}}"),
            ],
        ),
        (
            "Ingest",
            [
                stacked("Batches a second", _rate("ddpobs_server_batches_total", "outcome"), "{{outcome}}", "short"),
                lines("Bucket spans a second", [(_rate("ddpobs_server_spans_total", "instance"), NAMED)], "short"),
                lines("Bytes a second", [(_rate("ddpobs_server_ingest_bytes_total", "instance"), NAMED)], "Bps"),
                lines(
                    "Age of batches: long where ranks had to spool",
                    [(_quantile(0.5, "batch_age"), "median"), (_quantile(0.9, "batch_age"), "p90")],
                    "s",
                ),
            ],
        ),
        (
            "Latency and queues",
            [
                lines(
                    "From arrival to commit",
                    [(_quantile(0.5, "ingest"), "median"), (_quantile(0.99, "ingest"), "p99")],
                    "s",
                ),
                lines(
                    "Commits",
                    [
                        (_quantile(0.5, "commit"), "median"),
                        (_quantile(0.99, "commit"), "p99"),
                        (f"max(ddpobs_server_writer_busy_seconds{{{OF}}})", "in flight"),
                    ],
                    "s",
                ),
                lines(
                    "Batches waiting",
                    [
                        (f"ddpobs_server_queue_depth{{{OF}}}", NAMED),
                        (f"max(ddpobs_server_queue_limit{{{OF}}})", "most that may"),
                    ],
                    "short",
                ),
                lines("Event loop late by", [(_quantile(0.99, "event_loop_lag"), "p99")], "s"),
            ],
        ),
        (
            "Refused and dropped",
            [
                stacked(
                    "Requests refused a second",
                    _rate("ddpobs_server_problems_total", "method, status, problem"),
                    "{{method}} {{status}} {{problem}}",
                    "short",
                ),
                lines(
                    "Records that ranks dropped",
                    [("sum by (run) (ddpobs_telemetry_dropped_total)", "{{run}}")],
                    "short",
                ),
            ],
        ),
        (
            "Database and retention",
            [
                lines("The database answers within", [(f"ddpobs_server_database_answer_seconds{{{OF}}}", NAMED)], "s"),
                lines("Clocks apart", [(f"abs(ddpobs_server_clock_skew_seconds{{{OF}}})", NAMED)], "s"),
                lines("Removed a second", [(_rate("ddpobs_server_removed_total", "what"), "{{what}}")], "short"),
                lines(
                    "Retention",
                    [
                        (f"time() - ddpobs_server_retention_success_timestamp_seconds{{{OF}}}", "since it succeeded"),
                        (f"ddpobs_server_retention_seconds{{{OF}}}", "a round takes"),
                    ],
                    "s",
                ),
            ],
        ),
        (
            "Process",
            [
                lines("Processors busy", [(_rate("process_cpu_seconds_total", "instance"), NAMED)], "short"),
                lines("Resident memory", [(f"process_resident_memory_bytes{{{OF}}}", NAMED)], "bytes"),
                lines("Scrapes take", [(f"ddpobs_server_scrape_seconds{{{OF}}}", NAMED)], "s"),
                lines("Open files", [(f"process_open_fds{{{OF}}}", NAMED)], "short"),
            ],
        ),
    ]


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{OF}}}[{OVER}]))"


def _quantile(q: float, what: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate(ddpobs_server_{what}_seconds_bucket{{{OF}}}[{OVER}])))"

"""The collector's dashboard: health, ingest, latency, refusals."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, Row, board, lines, number, stacked, variable

INSTANCE = 'instance=~"$instance"'
LEGEND = "{{instance}}"


def collector() -> dashboard.Dashboard:
    """Return the dashboard; each alert on the collector in `alerts.yml` has its panel here."""
    return board(
        "ddpobs: collector",
        "ddpobs-collector",
        "Health of the collectors, ingest, latency, and refusals.",
        [variable("instance", "label_values(ddpobs_server_info, instance)", many=True)],
        _rows(),
    )


def _rows() -> list[Row]:
    return [
        (
            "Health",
            [
                number("Database", f"ddpobs_server_database_up{{{INSTANCE}}}", "bool_yes_no", 4, LEGEND),
                number("Writer", f"ddpobs_server_writer_alive{{{INSTANCE}}}", "bool_yes_no", 4, LEGEND),
                number("Uptime", f"time() - process_start_time_seconds{{{INSTANCE}}}", "s", 4, LEGEND),
                number("Disk free", f'ddpobs_server_disk_bytes{{{INSTANCE},what="free"}}', "bytes", 4, LEGEND),
                number("Store", f"ddpobs_server_store_bytes{{{INSTANCE}}}", "bytes", 4, LEGEND),
                number("Version", f"ddpobs_server_info{{{INSTANCE}}}", "short", 4, "{{version}}"),
            ],
        ),
        (
            "Ingest",
            [
                stacked("Batches a second", _rate("ddpobs_server_batches_total", "outcome"), "{{outcome}}", "short"),
                lines("Bucket spans a second", [(_rate("ddpobs_server_spans_total", "instance"), LEGEND)], "short"),
                lines("Bytes a second", [(_rate("ddpobs_server_ingest_bytes_total", "instance"), LEGEND)], "Bps"),
                lines(
                    "Age of batches at arrival (long after spooling)",
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
                        (f"max(ddpobs_server_writer_busy_seconds{{{INSTANCE}}})", "in flight"),
                    ],
                    "s",
                ),
                lines(
                    "Batches waiting",
                    [
                        (f"ddpobs_server_queue_depth{{{INSTANCE}}}", LEGEND),
                        (f"max(ddpobs_server_queue_limit{{{INSTANCE}}})", "limit"),
                    ],
                    "short",
                ),
                lines("Event loop delay", [(_quantile(0.99, "event_loop_lag"), "p99")], "s"),
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
                    "Records dropped by ranks",
                    [("sum by (run) (ddpobs_telemetry_dropped_total)", "{{run}}")],
                    "short",
                ),
            ],
        ),
        (
            "Database and retention",
            [
                lines(
                    "Database response time", [(f"ddpobs_server_database_answer_seconds{{{INSTANCE}}}", LEGEND)], "s"
                ),
                lines(
                    "Clock difference to the database",
                    [(f"abs(ddpobs_server_clock_skew_seconds{{{INSTANCE}}})", LEGEND)],
                    "s",
                ),
                lines("Rows removed a second", [(_rate("ddpobs_server_removed_total", "what"), "{{what}}")], "short"),
                lines(
                    "Retention",
                    [
                        (
                            f"time() - ddpobs_server_retention_success_timestamp_seconds{{{INSTANCE}}}",
                            "since the last success",
                        ),
                        (f"ddpobs_server_retention_seconds{{{INSTANCE}}}", "duration of a round"),
                    ],
                    "s",
                ),
            ],
        ),
        (
            "Process",
            [
                lines("Processors busy", [(_rate("process_cpu_seconds_total", "instance"), LEGEND)], "short"),
                lines("Resident memory", [(f"process_resident_memory_bytes{{{INSTANCE}}}", LEGEND)], "bytes"),
                lines("Scrape duration", [(f"ddpobs_server_scrape_seconds{{{INSTANCE}}}", LEGEND)], "s"),
                lines("Open files", [(f"process_open_fds{{{INSTANCE}}}", LEGEND)], "short"),
            ],
        ),
    ]


def _rate(metric: str, labels: str) -> str:
    return f"sum by ({labels}) (rate({metric}{{{INSTANCE}}}[{OVER}]))"


def _quantile(q: float, duration: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate(ddpobs_server_{duration}_seconds_bucket{{{INSTANCE}}}[{OVER}])))"

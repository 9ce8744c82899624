"""The collector's dashboard: health, ingest, latency, refusals."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import OVER, Row, board, lines, number, stacked, top, variable

INSTANCE = 'instance=~"$instance"'
LEGEND = "{{instance}}"
_MOST_DROPPED = top(
    "sum by (run) (ddpobs_telemetry_dropped_total)", "run", "sum by (run) (ddpobs_telemetry_dropped_total @ end())"
)


def collector() -> dashboard.Dashboard:
    """Return the dashboard; each alert on the collector in `alerts.yml` has its panel here."""
    return board(
        "ddpobs: collector",
        "ddpobs-collector",
        "Health of the collectors, ingest, latency, and refusals.",
        [variable("instance", "label_values(ddpobs_server_info, instance)")],
        _rows(),
    )


def _rows() -> list[Row]:
    return [
        (
            "Health",
            [
                number(
                    "Database",
                    f"ddpobs_server_database_up{{{INSTANCE}}}",
                    "bool_yes_no",
                    4,
                    "The database answers and accepts batches. No means that nothing is stored.",
                    legend=LEGEND,
                    bounds=(1, 0.5),
                ),
                number(
                    "Writer",
                    f"ddpobs_server_writer_alive{{{INSTANCE}}}",
                    "bool_yes_no",
                    4,
                    "The writer's thread lives. No means that nothing is stored: restart the collector.",
                    legend=LEGEND,
                    bounds=(1, 0.5),
                ),
                number(
                    "Uptime",
                    f"time() - process_start_time_seconds{{{INSTANCE}}}",
                    "s",
                    4,
                    "Time since the start. A small value that returns again and again is a crash loop.",
                    legend=LEGEND,
                ),
                number(
                    "Disk free",
                    f'ddpobs_server_disk_bytes{{{INSTANCE},what="free"}}',
                    "bytes",
                    4,
                    "Free space on SQLite's disk. Below 1 GB is critical; batches are refused when it is full.",
                    legend=LEGEND,
                    bounds=(5e9, 1e9),
                ),
                number(
                    "Store",
                    f"ddpobs_server_store_bytes{{{INSTANCE}}}",
                    "bytes",
                    4,
                    "Size of the database. It should level off where retention holds it.",
                    legend=LEGEND,
                ),
                number(
                    "Version",
                    f"ddpobs_server_info{{{INSTANCE}}}",
                    "short",
                    4,
                    "Version of each collector. All should be equal, except during an upgrade.",
                    legend="{{version}}",
                ),
            ],
        ),
        (
            "Ingest",
            [
                stacked(
                    "Batches a second",
                    _rate("ddpobs_server_batches_total", "outcome"),
                    "{{outcome}}",
                    "short",
                    "Batches by outcome. stored and repeated are good; failed and conflict are bad.",
                ),
                lines(
                    "Bucket spans a second",
                    [(_rate("ddpobs_server_spans_total", "instance"), LEGEND)],
                    "short",
                    "Spans stored. It follows the number of ranks, buckets and steps.",
                ),
                lines(
                    "Bytes a second",
                    [(_rate("ddpobs_server_ingest_bytes_total", "instance"), LEGEND)],
                    "Bps",
                    "Bodies of batches, compressed. It follows the number of ranks and steps.",
                ),
                lines(
                    "Age of batches at arrival (long after spooling)",
                    [(_quantile(0.5, "batch_age"), "median"), (_quantile(0.9, "batch_age"), "p90")],
                    "s",
                    "From a batch's creation to its arrival. A few seconds are good; minutes mean that ranks spool.",
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
                    "Time of a batch in the collector. Milliseconds are good; seconds are bad.",
                ),
                lines(
                    "Commits",
                    [
                        (_quantile(0.5, "commit"), "median"),
                        (_quantile(0.99, "commit"), "p99"),
                        (f"max(ddpobs_server_writer_busy_seconds{{{INSTANCE}}})", "in flight"),
                    ],
                    "s",
                    "Duration of a commit. Below 100 ms is good; a second means a slow disk or database.",
                ),
                lines(
                    "Batches waiting",
                    [
                        (f"ddpobs_server_queue_depth{{{INSTANCE}}}", LEGEND),
                        (f"max(ddpobs_server_queue_limit{{{INSTANCE}}})", "limit"),
                    ],
                    "short",
                    "Batches that wait for the writer. Near zero is good; at the limit batches get 503.",
                ),
                lines(
                    "Event loop delay",
                    [(_quantile(0.99, "event_loop_lag"), "p99")],
                    "s",
                    "Delay of the event loop. Below 50 ms is good; above 0.5 s the collector needs more "
                    "processor time.",
                ),
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
                    "Refused requests by reason. None is good; a steady rate is a client with a wrong token "
                    "or a limit.",
                ),
                lines(
                    "Records dropped by ranks",
                    [(_MOST_DROPPED, "{{run}}")],
                    "short",
                    "Telemetry records lost before they reached the collector. 0 is good.",
                ),
            ],
        ),
        (
            "Database and retention",
            [
                lines(
                    "Database response time",
                    [(f"ddpobs_server_database_answer_seconds{{{INSTANCE}}}", LEGEND)],
                    "s",
                    "Time of the database's last answer. Milliseconds are good.",
                ),
                lines(
                    "Clock difference to the database",
                    [(f"abs(ddpobs_server_clock_skew_seconds{{{INSTANCE}}})", LEGEND)],
                    "s",
                    "Difference of the clocks. Below a second is good; above 5 s times of day are wrong.",
                ),
                lines(
                    "Rows removed a second",
                    [(_rate("ddpobs_server_removed_total", "what"), "{{what}}")],
                    "short",
                    "Rows that retention removed. Bursts are normal; none at all with a growing store is bad.",
                ),
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
                    "Time since the last successful round, and its duration. More than 15 minutes is bad.",
                ),
            ],
        ),
        (
            "Process",
            [
                lines(
                    "Processors busy",
                    [(_rate("process_cpu_seconds_total", "instance"), LEGEND)],
                    "short",
                    "Processors in use. One or less is normal; a level line at the machine's number is bad.",
                ),
                lines(
                    "Resident memory",
                    [(f"process_resident_memory_bytes{{{INSTANCE}}}", LEGEND)],
                    "bytes",
                    "Memory in use. A level line is good; steady growth is bad.",
                ),
                lines(
                    "Scrape duration",
                    [(f"ddpobs_server_scrape_seconds{{{INSTANCE}}}", LEGEND)],
                    "s",
                    "Time to render /metrics. It must stay below Prometheus's scrape timeout.",
                ),
                lines(
                    "Open files",
                    [(f"process_open_fds{{{INSTANCE}}}", LEGEND)],
                    "short",
                    "Open files and connections. A level line is good; steady growth is a leak.",
                ),
            ],
        ),
    ]


def _rate(metric: str, labels: str) -> str:
    return f"sum by ({labels}) (rate({metric}{{{INSTANCE}}}[{OVER}]))"


def _quantile(q: float, duration: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate(ddpobs_server_{duration}_seconds_bucket{{{INSTANCE}}}[{OVER}])))"

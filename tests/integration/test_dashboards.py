"""A real Prometheus that scraped a real run evaluates every query of every panel, and its alert reaches a receiver."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.rig import patience
from benchmarks.rig.ports import free_port
from benchmarks.rig.training import ROOT, train
from dashboards.build import FOLDER, dashboard_files
from tests.support.integration.slow_ranks import SLOW_RANK
from tests.support.integration.tools import need
from tests.support.server.batches import batch, pulse, put

pytestmark = pytest.mark.alone

RUN = "on-the-dashboard"


@dataclass
class Alertmanager:
    """A running Alertmanager, and the alerts that its receiver got."""

    address: str
    received: list[Any]


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    program = need("prometheus-alertmanager", "prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("alertmanager")
    received: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Keep the output short."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    receiver = {"name": "test", "webhook_configs": [{"url": f"http://127.0.0.1:{server.server_port}"}]}
    route = {"receiver": "test", "group_wait": "1s", "group_interval": "1s", "group_by": ["..."]}
    (folder / "config.yml").write_text(json.dumps({"route": route, "receivers": [receiver]}))
    address = f"127.0.0.1:{free_port()}"
    options = (f"--config.file={folder}/config.yml", f"--storage.path={folder}", "--cluster.listen-address=")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield Alertmanager(address, received)
    finally:
        process.terminate()
        process.wait(30)
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def prometheus(
    url: str, alertmanager: Alertmanager, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A Prometheus that scraped the collector every two seconds during a training with a slow rank.

    Queries are evaluated at the training's end, because a finished run leaves the metrics after a minute.
    """
    program = need("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    address = f"127.0.0.1:{free_port()}"
    rules = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["for"] = "1s"
    (folder / "alerts.yml").write_text(json.dumps(rules))
    client = httpx.Client(base_url=f"http://{address}/api/v1")
    target = url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "2s", "evaluation_interval": "1s"},
                "rule_files": ["alerts.yml"],
                "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager.address]}]}]},
                "scrape_configs": [{"job_name": "ddpobs", "static_configs": [{"targets": [target]}]}],
            }
        )
    )
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    for rank, activity in enumerate(("bucket", "data")):  # Its series exist while a run hangs.
        put(url, batch("hung", 0, rank, pulse=pulse(activity, 12)))
    training = threading.Thread(target=train, args=(url, RUN), kwargs={"slow_rank": SLOW_RANK, "steps": 150})
    training.start()
    try:
        _wait_for(client, f'ddpobs_straggler_steps_total{{run="{RUN}"}} > 20')
        _wait_for(client, f'ALERTS{{alertname="DdpobsStraggler",alertstate="firing",run="{RUN}"}}')
        _wait_for(client, "ddpobs_fleet_lost_seconds")
        training.join()
        time.sleep(2)
        # A scrape that fails on a busy machine ends every series for a moment.
        _wait_for(client, f'ddpobs_finding_gain_ratio{{run="{RUN}"}}')
        (scraped, *_) = evaluate(client, f'timestamp(ddpobs_run_info{{run="{RUN}"}})')
        client.params = client.params.set("time", scraped["value"][1])
        yield client
    finally:
        training.join()
        process.terminate()
        process.wait(30)
        client.close()


def evaluate(prometheus: httpx.Client, query: str) -> list[Any]:
    answer = prometheus.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    return answer["data"]["result"]  # type: ignore[no-any-return]


def _wait_for(prometheus: httpx.Client, query: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if evaluate(prometheus, query):
                return
        except (httpx.TransportError, json.JSONDecodeError):  # Prometheus has not started yet.
            pass
        time.sleep(0.5)
    raise AssertionError(f"{query} stayed empty for {seconds} s")


def dashboards() -> list[Any]:
    return [json.loads((FOLDER / name).read_text()) for name in dashboard_files()]


def queries() -> list[tuple[str, str]]:
    return [
        (panel["title"], target["expr"])
        for dashboard in dashboards()
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def with_values(expr: str, over: str = "20s") -> str:
    values = {"$run": RUN, "$rank": ".*", "$instance": ".*", "$__rate_interval": over, "$__range": "60s"}
    for name, value in {**values, "$__interval": "5s"}.items():
        expr = re.sub(re.escape(name) + r"\b", value, expr)
    return expr


def test_no_panel_is_empty(prometheus: httpx.Client) -> None:
    empty = [title for title, expr in queries() if not evaluate(prometheus, with_values(expr))]
    assert len(queries()) > 40
    assert empty == []


IN_15_S = {
    **{f'ddpobs_steps_total{{run="{RUN}",rank="{rank}"}}': 60 for rank in range(4)},
    f'ddpobs_step_duration_seconds_sum{{run="{RUN}"}}': 4 * 60 * 0.25,
    f'ddpobs_step_duration_seconds_count{{run="{RUN}"}}': 4 * 60,
    f'ddpobs_compared_steps_total{{run="{RUN}",rank="1"}}': 24,
    f'ddpobs_rank_delay_seconds_total{{run="{RUN}",rank="1"}}': 24 * 0.0625,
    f'ddpobs_comm_wait_seconds_total{{run="{RUN}",rank="1"}}': 24 * 0.125,
    f'ddpobs_straggler_steps_total{{run="{RUN}",rank="1",phase="backward"}}': 12,
}
"""Growth of each counter in 15 s: four ranks at four steps a second of 0.25 s each, of which not all are compared."""


@pytest.mark.parametrize(
    ("panel", "labels", "value"),
    [
        ("Steps a second", f'run="{RUN}"', 4),
        ("Step time, mean", f'run="{RUN}"', 0.25),
        ("Delay caused by a rank, per step", f'run="{RUN}", rank="1"', 0.0625),
        ("Waiting for the last rank, per step", f'run="{RUN}", rank="1"', 0.125),
        ("Share of steps in which a rank was last and late", f'run="{RUN}", rank="1", phase="backward"', 0.5),
    ],
)
@pytest.mark.parametrize("scrapes", [(5, "45s"), (60, "10m")], ids=["45 s after the start", "scraped slowly"])
def test_a_panel_shows_the_value_of_its_title(
    tmp_path: Path, panel: str, labels: str, value: float, scrapes: tuple[int, str]
) -> None:
    scrape_s, at = scrapes
    expectation = {
        "expr": with_values(dict(queries())[panel], over=f"{4 * scrape_s}s"),  # As Grafana chooses it.
        "eval_time": at,
        "exp_samples": [{"labels": f"{{{labels}}}", "value": value}],
    }
    series = [{"series": name, "values": f"0+{growth * scrape_s / 15}x60"} for name, growth in IN_15_S.items()]
    test = {"interval": f"{scrape_s}s", "input_series": series, "promql_expr_test": [expectation]}
    (tmp_path / "test.yml").write_text(json.dumps({"evaluation_interval": "5s", "tests": [test]}))
    command = [need("promtool", "prometheus"), "test", "rules", str(tmp_path / "test.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_alert_about_the_slow_rank_reaches_a_receiver_through_alertmanager(
    prometheus: httpx.Client, alertmanager: Alertmanager
) -> None:
    deadline = time.monotonic() + patience.HANG_S
    while not (alerts := [a for a in list(alertmanager.received) if is_about_the_slow_rank(a["labels"])]):
        assert time.monotonic() < deadline, alertmanager.received
        time.sleep(0.2)
    assert f"Run {RUN}: rank {SLOW_RANK} is slow in backward" in alerts[0]["annotations"]["summary"]
    assert alerts[0]["annotations"]["runbook_url"] == "https://ddpobs.example/help/straggler"
    assert alerts[0]["annotations"]["dashboard_url"] == f"/d/ddpobs-ranks?var-run={RUN}"
    description = alerts[0]["annotations"]["description"]
    parts = dict(line.split(": ", 1) for line in description.splitlines()[1:])
    assert list(parts) == ["cause", "where", "do", "saves"], description
    assert parts["cause"] != "not known to Prometheus"
    assert parts["do"].startswith(f"Rank {SLOW_RANK} on ")


def is_about_the_slow_rank(labels: Any) -> bool:
    expected = {"alertname": "DdpobsStraggler", "run": RUN, "ranks": str(SLOW_RANK), "phase": "backward"}
    return bool(expected.items() <= labels.items())


def test_the_table_of_findings_names_the_slow_rank_its_phase_and_the_gain(prometheus: httpx.Client) -> None:
    rows = evaluate(prometheus, with_values(dict(queries())["Findings"]))
    (slow,) = [row for row in rows if row["metric"]["code"] == "straggler"]
    assert slow["metric"]["title"].startswith(f"Rank {SLOW_RANK} ")
    assert all(row["metric"]["order"] in "123" for row in rows)
    assert is_about_the_slow_rank({"alertname": "DdpobsStraggler", **slow["metric"]})
    assert float(slow["value"][1]) > 0.1
    assert slow["metric"]["cause"]
    assert slow["metric"]["remedy"].startswith(f"Rank {SLOW_RANK} on ")
    assert all(row["metric"]["remedy"] for row in rows)


def test_a_start_and_a_finding_are_annotated(prometheus: httpx.Client) -> None:
    end = time.time()
    for board in dashboards():
        for annotation in board.get("annotations", {}).get("list", []):
            query: dict[str, Any] = {
                "query": with_values(annotation["expr"]),
                "start": end - 300,
                "end": end,
                "step": 5,
            }
            answer = prometheus.get("/query_range", params=query).json()
            assert answer["status"] == "success", answer
            samples = [len(series["values"]) for series in answer["data"]["result"]]
            assert samples or annotation["name"] == "Ends"
            assert max(samples, default=1) <= 2, annotation["name"]  # Scrapes are not aligned with the steps.


def test_every_variable_has_values(prometheus: httpx.Client) -> None:
    variables = [variable for dashboard in dashboards() for variable in dashboard["templating"]["list"]]
    with_query = [variable for variable in variables if variable["type"] == "query"]
    assert {variable["name"] for variable in with_query} == {"run", "rank", "instance", "page"}
    for variable in with_query:
        query = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match, query
        assert all(series["metric"].get(match[2]) for series in evaluate(prometheus, with_values(match[1])))
        assert evaluate(prometheus, with_values(match[1]))


def test_the_slow_rank_stands_out_in_prometheus(prometheus: httpx.Client) -> None:
    query = f'topk(1, ddpobs_rank_delay_seconds_total{{run="{RUN}"}})'
    assert [series["metric"]["rank"] for series in evaluate(prometheus, query)] == [str(SLOW_RANK)]


def test_the_committed_dashboards_match_the_code() -> None:
    for name, text in dashboard_files().items():
        assert (FOLDER / name).read_text() == text, "run `make dashboards`"


def test_rules_and_alerts_pass_promtools_tests() -> None:
    promtool = need("promtool", "prometheus")
    folder = ROOT / "dashboards" / "prometheus"
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "tests.yml", "collector_tests.yml"]):
        result = subprocess.run([promtool, *command], cwd=folder, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_guides_scrapes_are_valid_and_have_a_token_and_the_job_name_of_the_alerts(
    tmp_path: Path,
) -> None:
    guide = (ROOT / "docs" / "operations" / "monitoring.md").read_text()
    (snippet,) = re.findall(r"^    global: .*\n    scrape_configs:\n(?:     .*\n)+", guide, re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(textwrap.dedent(snippet))
    command = [need("promtool", "prometheus"), "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    scrapes = yaml.safe_load(snippet)["scrape_configs"]
    assert {scrape["params"]["only"][0] for scrape in scrapes} == {"runs", "collector"}
    for scrape in scrapes:
        assert scrape["job_name"].startswith("ddpobs")
        assert scrape["authorization"]["credentials_file"]


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    folder = ROOT / "dashboards" / "prometheus"
    groups = yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
    tested = [
        case["alertname"]
        for name in ("tests.yml", "collector_tests.yml")
        for test in yaml.safe_load((folder / name).read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    ]
    assert {rule["alert"] for group in groups for rule in group["rules"]} == set(tested)


def test_every_metric_in_dashboards_and_rules_exists(prometheus: httpx.Client) -> None:
    texts = [expr for _, expr in queries()] + [
        path.read_text() for path in (ROOT / "dashboards" / "prometheus").glob("*s.yml") if "tests" not in path.name
    ]
    names = set(re.findall(r"(?<![:\w])ddpobs_\w+", " ".join(texts))) - {"ddpobs_comm_moving", "ddpobs_data"}
    existing = set(prometheus.get("/label/__name__/values").json()["data"])
    existing |= set(prometheus.get("/metadata").json()["data"])  # No host is slow here: a type without a series.
    assert names - existing == set()

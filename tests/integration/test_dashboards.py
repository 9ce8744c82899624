"""A real Prometheus that scraped a real run evaluates every query of every panel and variable."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dashboards.build import FOLDER, dashboard_files
from tests.integration.conftest import SLOW_RANK
from tests.integration.tools import need
from tests.integration.training import ROOT, train
from tests.ports import free_port
from tests.server.batches import batch, pulse, put

pytestmark = pytest.mark.alone

RUN = "on-the-dashboard"


@pytest.fixture(scope="module")
def prometheus(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that scraped the collector every second during a training with a slow rank.

    Queries are evaluated at the training's end, because a finished run leaves the metrics after a minute.
    """
    program = need("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    address = f"127.0.0.1:{free_port()}"
    client = httpx.Client(base_url=f"http://{address}/api/v1", timeout=60)
    target = url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
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
        training.join()
        time.sleep(2)
        client.params = client.params.set("time", time.time())
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


def with_values(expr: str) -> str:
    return expr.replace("$run", RUN).replace("$rank", ".*").replace("$instance", ".*")


def test_no_panel_is_empty(prometheus: httpx.Client) -> None:
    empty = [title for title, expr in queries() if not evaluate(prometheus, with_values(expr))]
    assert len(queries()) > 50
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
        ("Share of steps in which a rank was last and late", 'rank="1", phase="backward"', 0.5),
    ],
)
@pytest.mark.parametrize("scrapes", [4, 1], ids=["four scrapes a minute", "one scrape a minute"])
def test_a_panel_shows_the_value_of_its_title(
    tmp_path: Path, panel: str, labels: str, value: float, scrapes: int
) -> None:
    expectation = {
        "expr": with_values(dict(queries())[panel]),
        "eval_time": "10m" if scrapes > 1 else "10m30s",
        "exp_samples": [{"labels": f"{{{labels}}}", "value": value}],
    }
    series = [{"series": name, "values": f"0+{growth * 4 / scrapes}x60"} for name, growth in IN_15_S.items()]
    test = {"interval": f"{60 // scrapes}s", "input_series": series, "promql_expr_test": [expectation]}
    (tmp_path / "test.yml").write_text(json.dumps({"tests": [test]}))
    command = [need("promtool", "prometheus"), "test", "rules", tmp_path / "test.yml"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_variable_has_values(prometheus: httpx.Client) -> None:
    variables = [variable for dashboard in dashboards() for variable in dashboard["templating"]["list"]]
    with_query = [variable for variable in variables if variable["type"] == "query"]
    assert {variable["name"] for variable in with_query} == {"run", "rank", "instance"}
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
    guide = (ROOT / "docs" / "operations.md").read_text()
    (snippet,) = re.findall(r"^    global: .*\n    scrape_configs:\n(?:     .*\n)+", guide, re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(textwrap.dedent(snippet))
    command = [need("promtool", "prometheus"), "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
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
    names = set(re.findall(r"(?<![:\w])ddpobs_\w+", " ".join(texts))) - {"ddpobs_exposed_comm", "ddpobs_data"}
    existing = set(prometheus.get("/label/__name__/values").json()["data"])
    assert names - existing == set()

"""The dashboards keep the rules of Grafana's dashboard-linter, and links and alerts lead somewhere.

Source: https://github.com/grafana/dashboard-linter/tree/main/docs/rules. Its rules about the labels `job` and
`instance` do not apply: a run's series have the same meaning whichever collector was scraped.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ddpobs_server.figures.theme import PART_COLORS, PART_TITLES

from dashboards import build
from dashboards.alert_page import GUIDES, PAGE, alert_page
from dashboards.build import dashboard_files
from dashboards.panels import TOP
from tests.support.integration.tools import need

ROOT = Path(__file__).resolve().parents[2]
BOARDS: dict[str, Any] = {name: json.loads(text) for name, text in dashboard_files().items()}
PANELS: list[Any] = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
RULES: list[Any] = [
    rule
    for group in yaml.safe_load((ROOT / "dashboards" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
UNITS = {"short", "s", "h", "bytes", "Bps", "percentunit", "bool_yes_no"}


def test_there_are_four_dashboards_with_stable_uids() -> None:
    names = ("fleet", "run", "ranks", "collector")
    assert {name: board["uid"] for name, board in BOARDS.items()} == {f"{n}.json": f"ddpobs-{n}" for n in names}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_read_only_with_a_data_source_to_choose_and_links_to_the_others(board: Any) -> None:
    assert board["editable"] is False
    assert board["description"]
    first, *others = board["templating"]["list"]
    assert (first["name"], first["label"], first["query"]) == ("datasource", "Data source", "prometheus")
    for variable in others:
        assert (variable["datasource"]["uid"], variable["refresh"]) == ("${datasource}", 2)
        is_one_run = variable["name"] == "run" and board["uid"] != "ddpobs-fleet"
        assert variable["name"] == "page" or (variable["multi"] and variable["includeAll"] != is_one_run)
    (link,) = board["links"]
    assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == ("dashboards", ["ddpobs"], True, True)
    assert board["tags"] == ["ddpobs"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_a_title_a_description_a_unit_and_queries_of_the_chosen_source(panel: Any) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 40
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


@pytest.mark.parametrize("panel", PANELS)
def test_rates_have_the_rate_interval_and_counters_that_grow_are_rates(panel: Any) -> None:
    for target in panel["targets"]:
        windows = re.findall(r"\[([^]]+)\]", target["expr"])
        assert set(windows) <= {"$__rate_interval", "$__range"}
        over_time = panel["type"] in ("timeseries", "statushistory")
        for counter in re.findall(r"\w*(?<!dropped)_(?:total|bucket|sum|count)\{", target["expr"]) if over_time else ():
            assert re.search(rf"(rate|increase)\({re.escape(counter)}", target["expr"]), target["expr"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_selects_what_its_dashboards_variables_choose(panel: Any) -> None:
    for target in panel["targets"]:
        selectors = re.findall(r"\{[^{}]*\}|ddpobs_\w+(?=[ )])", target["expr"])
        chosen = [s for s in selectors if "$run" in s or "$instance" in s]
        is_of_all_runs = "ddpobs_fleet_" in target["expr"]
        assert bool(chosen) != is_of_all_runs or panel["title"] == "Records dropped by ranks"


@pytest.mark.parametrize("panel", [p for p in PANELS if p.values[0]["type"] in ("table", "barchart")])
def test_a_table_has_no_column_of_labels_that_nobody_reads(panel: Any) -> None:
    (target,) = panel["targets"]
    by = re.findall(r"\w+ by \(([^)]*)\)", target["expr"])
    assert by  # An aggregation has neither __name__ nor job and instance.
    options = {each["id"]: each["options"] for each in panel["transformations"]}
    if panel["type"] == "table":
        organised = options["organize"]
        joined = re.findall(r"group_left \(([^)]*)\)", target["expr"])[0]
        columns = {"Time", "Value", "order", *by[0].split(", "), *joined.split(", ")}
        assert columns == set(organised["excludeByName"]) | set(organised["indexByName"])
        assert set(organised["indexByName"]) == set(organised["renameByName"])
        overridden = {each["matcher"]["options"] for each in panel["fieldConfig"]["overrides"]}
        assert overridden == set(organised["renameByName"].values())
    else:
        assert options["groupingToMatrix"] == {"rowField": "line", "columnField": "phase", "valueField": "Value"}
        assert panel["options"]["xField"] == "line\\phase"


FINDINGS = next(panel.values[0] for panel in PANELS if panel.values[0]["title"] == "Findings")
_FOUND = """\
ddpobs_finding_gain_ratio{run="r",code="straggler",severity="warning",ranks="1",phase="backward",title="Rank 1 is slow"}
ddpobs_finding_gain_ratio{run="r",code="crash",severity="critical",ranks="0",phase="forward",title="Rank 0 failed"}
ddpobs_finding_gain_ratio{run="r",code="hang",severity="critical",ranks="3",phase="",title="The run hangs"}
ddpobs_finding_gain_ratio{run="r",code="input-bound",severity="info",ranks="",phase="data",title="Training waits"}
ddpobs_finding_gain_ratio{run="r",code="scaling-loss",severity="info",ranks="",phase="",title="Half is lost"}
ddpobs_straggler_info{run="r",severity="warning",ranks="1",phase="backward",cause="c1",where="w1",remedy="d1"}
ddpobs_straggler_info{run="r",severity="warning",ranks="1",phase="backward",cause="c1",where="w1",remedy="d1",job="2"}
ddpobs_failure_info{run="r",code="crash",severity="critical",ranks="0",title="Rank 0 failed",cause="c2",remedy="d2"}
ddpobs_hang_info{run="r",ranks="3",place="train.py:9",where="host n1",remedy="d3"}
ddpobs_finding_gain_ratio{run="s",code="straggler",severity="info",ranks="1",phase="data",title="Rank 1 is slow"}
ddpobs_straggler_info{run="s",severity="info",ranks="1",phase="data",cause="before",where="w",remedy="d"}
ddpobs_straggler_info{run="s",severity="info",ranks="1",phase="data",cause="now",where="w",remedy="d"}
"""
_ON_THE_PAGE = "See cause and remedy on the run's page."
_ROWS = [
    ("crash", "critical", "0", "forward", "Rank 0 failed", {"cause": "c2", "remedy": "d2"}, 1),
    ("hang", "critical", "3", "", "The run hangs", {"where": "host n1, train.py:9", "remedy": "d3"}, 1),
    ("straggler", "warning", "1", "backward", "Rank 1 is slow", {"cause": "c1", "where": "w1", "remedy": "d1"}, 2),
    ("input-bound", "info", "", "data", "Training waits", {"remedy": _ON_THE_PAGE}, 3),
]
"""Code, severity, ranks, phase, title, explanation and order of each row of the run `r`."""


def test_a_finding_has_its_cause_place_and_remedy_however_often_they_were_scraped(tmp_path: Path) -> None:
    series = [{"series": line, "values": "1x12" if "_info" in line else "0.25x12"} for line in _FOUND.splitlines()]
    (target,) = FINDINGS["targets"]
    rows = [
        {"code": code, "severity": severity, "ranks": ranks, "phase": phase, "title": title, "order": str(order)} | why
        for code, severity, ranks, phase, title, why, order in _ROWS
    ]
    samples = [{"labels": _labels({"run": "r"} | row), "value": 0.25} for row in rows]
    checks = [
        {"expr": target["expr"].replace("$run", "r"), "eval_time": "1m", "exp_samples": samples},
        {"expr": f"count({target['expr'].replace('$run', 's')})", "eval_time": "1m", "exp_samples": [_COUNT]},
    ]
    run_promtool(tmp_path, series, checks)


_COUNT = {"labels": "{}", "value": 1}


def _labels(row: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in row.items() if value) + "}"


def test_the_table_has_at_most_fifty_rows_and_keeps_the_critical_ones(tmp_path: Path) -> None:
    named = 'ddpobs_finding_gain_ratio{{run="r{}",code="crash",severity="{}",ranks="0",phase="",title="t"}}'
    series = [
        {
            "series": named.format(number, "critical" if number < 3 else "info"),
            "values": f"{0 if number < 3 else 0.9}x5",
        }
        for number in range(80)
    ]
    (target,) = FINDINGS["targets"]
    expr = target["expr"].replace("$run", ".+")
    checks = [
        {"expr": f"count({expr})", "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": 50}]},
        {"expr": f"count(({expr}) == 0)", "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": 3}]},
    ]
    run_promtool(tmp_path, series, checks)


def run_promtool(folder: Path, series: list[dict[str, str]], checks: list[dict[str, Any]]) -> None:
    test = {"interval": "15s", "input_series": series, "promql_expr_test": checks}
    (folder / "test.yml").write_text(json.dumps({"evaluation_interval": "15s", "tests": [test]}))
    command = [need("promtool", "prometheus"), "test", "rules", str(folder / "test.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[:4000]


def test_a_finding_leads_to_the_page_of_its_run_and_its_code_to_help() -> None:
    links = {
        each["matcher"]["options"]: prop["value"][0]["url"]
        for each in FINDINGS["fieldConfig"]["overrides"]
        for prop in each["properties"]
        if prop["id"] == "links"
    }
    of_run = "${page}/runs/${__data.fields.Run}"
    assert links == {"Run": of_run, "Finding": f"{of_run}#findings", "Help": "${page}/help/${__value.raw}"}


@pytest.mark.parametrize("panel", [p for p in PANELS if "phase" in p.values[0]["title"]])
def test_phases_have_the_colours_of_the_page(panel: Any) -> None:
    overrides = panel["fieldConfig"]["overrides"]
    colors = {
        each["matcher"]["options"].strip("/$"): prop["value"]["fixedColor"]
        for each in overrides
        for prop in each["properties"]
        if prop["id"] == "color"
    }
    names = {PART_TITLES[part]: color for part, color in PART_COLORS.items()}
    assert colors in (names, PART_COLORS)


OF_LINES = ("timeseries", "status-history", "state-timeline", "bargauge")
LINES: list[Any] = [p for p in PANELS if p.values[0]["type"] in OF_LINES]


@pytest.mark.parametrize("panel", LINES)
def test_lines_of_ranks_and_buckets_are_selected_once_for_the_whole_range(panel: Any) -> None:
    counts = [
        int(match[1])
        for target in panel["targets"]
        for match in re.finditer(r"topk\((\d+), (?P<ranking>.*)", target["expr"])
        if panel["type"] == "bargauge" or "@ end()" in match["ranking"]
    ]
    assert sum(counts) <= TOP
    many = [t for t in panel["targets"] if re.search(r"\{\{(rank|bucket)\}\}", t["legendFormat"])]
    assert len(counts) >= len(many), panel["title"]


RANKS_1024 = [
    *(
        ("steps_total", ""),
        ("comm_seconds_total", ""),
        ("comm_exposed_seconds_total", ""),
        ("comm_wait_seconds_total", ""),
    ),
    *(
        ("comm_moving_seconds_total", ""),
        ("allreduce_bytes_total", ""),
        ("compared_steps_total", ""),
        ("rank_delay_seconds_total", ""),
    ),
    *(("last_step_timestamp_seconds", ""), ("straggler_steps_total", ',phase="backward"')),
    *(("phase_seconds_total", f',phase="{phase}"') for phase in ("data", "forward", "backward", "exposed_comm")),
]


def test_a_panel_has_at_most_twelve_lines_at_1024_ranks_and_300_buckets(tmp_path: Path) -> None:
    def grown(name: str, labels: str, index: int) -> dict[str, str]:
        return {"series": f'ddpobs_{name}{{run="r",{labels}}}', "values": f"0+{1 + index % 97}x12"}

    series = [grown(name, f'rank="{rank}"{more}', rank) for name, more in RANKS_1024 for rank in range(1024)]
    of_buckets = (
        "bucket_ready_seconds_total",
        "bucket_comm_seconds_total",
        "bucket_exposed_seconds_total",
        "bucket_bytes",
    )
    series += [grown(name, f'bucket="{bucket}"', bucket) for name in of_buckets for bucket in range(300)]
    names = {"$run": "r", "$rank": ".*", "$instance": ".*", "$__rate_interval": "4m", "$__range": "10m"}
    checks = []
    for panel in (p.values[0] for p in LINES if "dropped" not in p.values[0]["title"]):
        exprs = [target["expr"] for target in panel["targets"] if "{{instance}}" not in target["legendFormat"]]
        for name, value in names.items():
            exprs = [re.sub(re.escape(name) + r"\b", value, expr) for expr in exprs]
        many = " + ".join(f"(count({expr}) or vector(0))" for expr in exprs) or "vector(0)"
        checks.append({"expr": f"{many} > {TOP}", "eval_time": "11m", "exp_samples": []})
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    (tmp_path / "test.yml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    command = [need("promtool", "prometheus"), "test", "rules", str(tmp_path / "test.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[:2000]


def test_a_module_without_its_dashboard_fails_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grafana").mkdir()
    (tmp_path / "panels_of_tomorrow.py").touch()
    monkeypatch.setattr(build, "FOLDER", tmp_path / "grafana")
    monkeypatch.setattr("dashboards.__path__", [str(tmp_path)])
    with pytest.raises(LookupError, match=r"expected a function panels_of_tomorrow\(\)"):
        dashboard_files()


def test_series_of_a_run_link_to_its_page_and_its_dashboards() -> None:
    urls = [
        link["url"]
        for board in BOARDS.values()
        for panel in board["panels"]
        if panel["type"] != "row"
        for link in panel["fieldConfig"]["defaults"].get("links", [])
    ]
    assert {url.split("?")[0] for url in urls} == {
        "${page}/runs/${__field.labels.run}",
        "/d/ddpobs-run",
        "/d/ddpobs-ranks",
    }


@pytest.mark.parametrize(
    "board", [b for b in BOARDS.values() if b["uid"] != "ddpobs-collector"], ids=lambda b: b["uid"]
)
def test_starts_ends_and_findings_are_annotated_once(board: Any) -> None:
    annotations = board["annotations"]["list"]
    assert [annotation["name"] for annotation in annotations] == ["Starts and attempts", "Ends", "Findings"]
    for annotation in annotations:
        assert "unless" in annotation["expr"]
        assert "offset $__interval" in annotation["expr"]
        assert "{{run}}" in annotation["textFormat"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_texts_a_page_of_the_guide_and_a_dashboard(rule: Any) -> None:
    annotations = rule["annotations"]
    of_run = {"page_url"} if "labels.run " in annotations["summary"] else set()
    assert set(annotations) == {"summary", "description", "runbook_url", "dashboard_url"} | of_run
    base = r'\{\{ with query "last_over_time\(ddpobs_server_info\[1d\]\)" \}\}.*"%s" \}\}\{\{ end \}\}'
    guide = GUIDES.get(rule["alert"], "").rpartition("/")[2] or f"alerts#{rule['alert'].lower()}"
    assert re.fullmatch(base % "public_url" + f"/help/{guide}", annotations["runbook_url"])
    assert f"### {rule['alert']}\n" in PAGE.read_text()
    uid = re.match(base % "grafana_url" + r"/d/([\w-]+)", annotations["dashboard_url"])
    assert uid is not None
    assert uid[1] in {board["uid"] for board in BOARDS.values()}


def test_the_page_of_the_alerts_is_that_of_the_rules() -> None:
    assert PAGE.read_text() == alert_page(), "run make dashboards"
    assert {rule["alert"] for rule in RULES} >= GUIDES.keys()
    assert all((ROOT / "docs" / f"{page}.md").exists() for page in GUIDES.values())


def test_every_alert_has_a_case_in_which_it_does_not_fire() -> None:
    folder = ROOT / "dashboards" / "prometheus"
    silent = {
        case["alertname"]
        for name in ("tests.yml", "collector_tests.yml")
        for test in yaml.safe_load((folder / name).read_text())["tests"]
        for case in test["alert_rule_test"]
        if not case["exp_alerts"]
    }
    assert {rule["alert"] for rule in RULES} - silent == set()

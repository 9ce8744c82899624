"""The dashboards keep the rules of Grafana's dashboard-linter, and links and alerts lead somewhere.

Source: https://github.com/grafana/dashboard-linter/tree/main/docs/rules. Its rules about the labels `job` and
`instance` do not apply: a run's series have the same meaning whichever collector was scraped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.build import dashboard_files

ROOT = Path(__file__).resolve().parents[2]
BOARDS: dict[str, Any] = {name: json.loads(text) for name, text in dashboard_files().items()}
PANELS = [
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


def test_there_are_five_dashboards_with_stable_uids() -> None:
    names = ("fleet", "run", "ranks", "buckets", "collector")
    assert {name: board["uid"] for name, board in BOARDS.items()} == {f"{n}.json": f"ddpobs-{n}" for n in names}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_read_only_with_a_data_source_to_choose_and_links_to_the_others(board: Any) -> None:
    assert board["editable"] is False
    assert board["description"]
    first, *others = board["templating"]["list"]
    assert (first["name"], first["label"], first["query"]) == ("datasource", "Data source", "prometheus")
    for variable in others:
        assert (variable["datasource"]["uid"], variable["refresh"]) == ("${datasource}", 2)
        assert variable["name"] == "page" or (variable["multi"] and variable["includeAll"])
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
        assert set(windows) <= {"$__rate_interval"}
        over_time = panel["type"] in ("timeseries", "statushistory")
        for counter in re.findall(r"\w*(?<!dropped)_(?:total|bucket|sum|count)\{", target["expr"]) if over_time else ():
            assert re.search(rf"(rate|increase)\({re.escape(counter)}", target["expr"]), target["expr"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_selects_what_its_dashboards_variables_choose(panel: Any) -> None:
    for target in panel["targets"]:
        selectors = re.findall(r"\{[^{}]*\}|ddpobs_\w+(?=[ )])", target["expr"])
        chosen = [s for s in selectors if "$run" in s or "$instance" in s]
        assert chosen or panel["title"] == "Records dropped by ranks"


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
        "${page}/runs/${__data.fields.run}",
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
    assert set(annotations) == {"summary", "description", "runbook_url", "dashboard_url"}
    page, _, anchor = annotations["runbook_url"].partition("#")
    text = (ROOT / page).read_text()
    headings = [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()]
    assert not anchor or anchor in headings
    uid = re.match(r"/d/([\w-]+)", annotations["dashboard_url"])
    assert uid is not None
    assert uid[1] in {board["uid"] for board in BOARDS.values()}


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

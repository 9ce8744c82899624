"""The page of the alerts, `docs/reference/alerts.md`, which the collector serves as help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
ALERTS = ROOT / "dashboards" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "reference" / "alerts.md"
_HEAD = """# Alerts

`make dashboards` writes this page from `dashboards/prometheus/alerts.yml`. Names in capitals stand for labels, VALUE
for the expression's value. See also [how they are sent](../operations/monitoring.md#alerts).
"""
GUIDES = {
    "DdpobsStraggler": "findings/straggler",
    "DdpobsCommBound": "findings/comm-bound",
    "DdpobsInputBound": "findings/input-bound",
    "DdpobsCrash": "findings/crash",
    "DdpobsRunFailed": "findings/crash",
    "DdpobsRunLost": "findings/lost",
    "DdpobsReplicasDiffer": "findings/replicas-differ",
    "DdpobsHang": "findings/hang",
    "DdpobsNoStep": "findings/hang",
    "DdpobsNoFirstStep": "findings/hang",
    "DdpobsTelemetryLoss": "findings/telemetry-loss",
    "DdpobsSlowHost": "findings/straggler",
    "DdpobsBinsBehind": "operations/retention",
    "DdpobsHistoryLost": "operations/retention",
}
"""Pages of the help on what an alert is about, to which it links; the others link to their place on this page."""


def alert_page() -> str:
    """The whole page."""
    return f"{_HEAD}\n{alert_reference()}\n"


def alert_reference() -> str:
    """Each alert with its severity, its texts and its expression, as Markdown; those about runs first."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    of_runs = [rule for rule in rules if "$labels.instance" not in rule["annotations"]["summary"]]
    of_collector = [rule for rule in rules if rule not in of_runs]
    return "\n\n".join(["## About runs", *map(_alert, of_runs), "## About the collector", *map(_alert, of_collector)])


def _alert(rule: dict[str, Any]) -> str:
    held = f" after {rule['for']}" if "for" in rule else ""
    texts = [_plain(rule["annotations"][name]) for name in ("summary", "description")]
    expression = f"```text\n{rule['expr'].strip()}\n```"
    page = GUIDES.get(rule["alert"])
    guide = [f"Help: [{Path(page).stem}](../{page}.md)."] if page else []
    severity = rule["labels"]["severity"]
    return "\n\n".join([f"### {rule['alert']}", f"**{severity}**{held}: {texts[0]}", texts[1], *guide, expression])


def _plain(template: str) -> str:
    """A text of Prometheus' templates with names for its values; of two texts, that of a value that is known."""
    text = re.sub(r"\{\{ if .*?\{\{ else \}\}(.*?)\{\{ end \}\}", r"\1", template, flags=re.DOTALL)
    text = re.sub(r"\{\{ with \$labels\.(\w+) \}\}([^{]*)\{\{ \. \}\}", r"\2{{ $labels.\1 }}", text)
    text = re.sub(r"\{\{ with label \"(\w+)\" \$why \}\}([^{]*)\{\{ \. \}\}", r"\2{{ $labels.\1 }}", text)
    text = re.sub(r"\{\{ else \}\}[^{]*", "", text)
    text = re.sub(
        r"\{\{ \$labels\.(\w+) \}\}|\{\{ label \"(\w+)\" \$why \}\}", lambda found: (found[1] or found[2]).upper(), text
    )
    text = re.sub(r"\{\{ \$value[^}]*\}\}B", "VALUE bytes", text)
    text = re.sub(r"\{\{ \$value.*?\}\}", "VALUE", text)
    return re.sub(r"\{\{.*?\}\}", "", text).replace("\n", "  \n").replace("<", "&lt;")

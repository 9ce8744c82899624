"""Build the Grafana dashboards, the rules in `deploy/kubernetes/`, and the alerts' page: `python -m dashboards.build`.

A module of this folder is a dashboard, unless `_SHARED` names it, and has a function of its own name that returns it.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import alert_page

FOLDER = Path(__file__).parent / "grafana"
PROMETHEUS = Path(__file__).parent / "prometheus"
RULES = Path(__file__).parents[1] / "deploy/kubernetes/prometheus-operator/rules.yaml"
_SHARED = {"alert_page", "build", "panels", "tables"}


def dashboard_files() -> dict[str, str]:
    """Return the JSON of every dashboard by file name."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    names = sorted({path.stem for path in FOLDER.parent.glob("*.py")} - _SHARED)
    return {f"{name}.json": encoder.encode(_board(name)) + "\n" for name in names}


def _board(name: str) -> object:
    module = import_module(f"dashboards.{name}")
    if not hasattr(module, name):
        raise LookupError(f"dashboards/{name}.py: expected a function {name}() that returns a dashboard, found none")
    return getattr(module, name)().build()


def prometheus_rules() -> str:
    """Return the recording rules and the alerts as objects of the Prometheus Operator."""
    objects = [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": f"ddpobs-{name}"},
            "spec": yaml.safe_load((PROMETHEUS / f"{name}.yml").read_text()),
        }
        for name in ("rules", "alerts")
    ]
    return "# Written by `make dashboards`.\n" + yaml.safe_dump_all(objects, sort_keys=False, width=1000)


def main() -> None:
    """Write the rules, the alerts' page and every dashboard, print their paths, and delete former dashboards."""
    for path, text in ((RULES, prometheus_rules()), (alert_page.PAGE, alert_page.alert_page())):
        path.write_text(text)
        print(path.relative_to(FOLDER.parents[1]))
    files = dashboard_files()
    for name, text in files.items():
        json.loads(text)
        (FOLDER / name).write_text(text)
        print(f"dashboards/grafana/{name}")
    for path in FOLDER.glob("*.json"):
        if path.name not in files:
            path.unlink()


if __name__ == "__main__":
    main()

"""`deploy/kubernetes` against the schemas of Kubernetes and the policies of checkov. No cluster runs here."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import ddpobs
from benchmarks.rig.training import ROOT
from dashboards.build import PROMETHEUS, RULES, prometheus_rules
from tests.support.integration.tools import need_in

pytestmark = pytest.mark.wide
KUBERNETES = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / ".venv" / "manifests" / "bin"
OVERLAYS = ("base", "postgresql", "prometheus-operator", "grafana")
NOT_MET = {
    "CKV_K8S_43": "The image is built by its user, who alone can give its digest.",
    "CKV_K8S_15": "An image that was loaded into the nodes is in no registry from which it could always be pulled.",
}
OF_POSTGRESQL = {"CKV_K8S_35": "libpq refuses a password file that a group may read, as a mounted secret is."}


def tool(name: str) -> str:
    return need_in(TOOLS, name, "scripts/setup.sh manifests")


@cache
def rendered(overlay: str) -> str:
    return subprocess.run([tool("kubectl"), "kustomize", KUBERNETES / overlay], stdout=-1, text=True, check=True).stdout


def objects(overlay: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(rendered(overlay)) if each["kind"] == kind]


def refused(manifest: Path) -> str:
    """What the schemas of Kubernetes refuse; empty for nothing."""
    command = [tool("kubernetes-validate"), "--strict", "--quiet", str(manifest)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0 or checked.stdout + checked.stderr
    return "" if checked.returncode == 0 else checked.stdout + checked.stderr


@pytest.mark.parametrize("overlay", ["base", "postgresql", "grafana"])
def test_every_object_has_the_schema_of_kubernetes(overlay: str, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(rendered(overlay))
    assert refused(manifest) == ""
    manifest.write_text(rendered(overlay).replace("  name: ddpobs", "  nam: ddpobs"))
    assert "nam" in refused(manifest)


@pytest.mark.parametrize("name", ["pytorchjob", "jobset"])
def test_the_pods_of_a_training_have_the_schema_of_kubernetes(name: str, tmp_path: Path) -> None:
    job = yaml.safe_load((KUBERNETES / "training" / f"{name}.yaml").read_text())
    templates = list(pod_templates(job))
    assert len(templates) == {"pytorchjob": 2, "jobset": 1}[name]
    for template in templates:
        manifest = tmp_path / "manifest.yaml"
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        manifest.write_text(yaml.safe_dump(pod))
        assert refused(manifest) == ""


def pod_templates(value: Any) -> list[Any]:
    """Templates of pods anywhere in an object."""
    if isinstance(value, dict) and "containers" in value.get("template", {}).get("spec", {}):
        return [value["template"]]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [template for part in parts for template in pod_templates(part)]


@pytest.mark.parametrize("overlay", ["base", "postgresql"])
def test_the_collector_meets_the_policies_but_those_with_a_reason(overlay: str, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(rendered(overlay))
    command = [tool("checkov"), "--framework", "kubernetes", "--skip-download", "--output", "json", "-f", str(manifest)]
    checked = json.loads(subprocess.run(command, stdout=-1, check=False).stdout)
    assert checked["summary"]["passed"] > 80
    failed = {check["check_id"] for check in checked["results"]["failed_checks"]}
    assert failed == set(NOT_MET) | (set(OF_POSTGRESQL) if overlay == "postgresql" else set())


def test_the_image_has_the_version_of_this_collector() -> None:
    (collector,) = objects("base", "StatefulSet")
    assert collector["spec"]["template"]["spec"]["containers"][0]["image"] == f"ddpobs-server:{ddpobs.__version__}"


def test_secrets_are_named_and_none_is_contained() -> None:
    assert [each for overlay in OVERLAYS for each in objects(overlay, "Secret")] == []


@pytest.mark.parametrize("name", ["pytorchjob", "jobset"])
def test_a_training_may_reach_the_collector_and_finds_it(name: str) -> None:
    (service,), (policy,) = objects("base", "Service"), objects("base", "NetworkPolicy")
    address = (
        f"http://{service['metadata']['name']}.{service['metadata']['namespace']}:{service['spec']['ports'][0]['port']}"
    )
    allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    job = yaml.safe_load((KUBERNETES / "training" / f"{name}.yaml").read_text())
    for template in pod_templates(job):
        assert allowed.items() <= template["metadata"]["labels"].items()
        environ = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert environ["DDPOBS_TELEMETRY"] == address


def test_two_collectors_on_postgresql_have_no_volume_of_their_own() -> None:
    (collector,) = objects("postgresql", "StatefulSet")
    assert collector["spec"]["replicas"] == 2
    assert "volumeClaimTemplates" not in collector["spec"]


def test_prometheus_scrapes_the_service_under_the_jobs_that_the_alerts_select() -> None:
    (monitor,), (service,) = objects("prometheus-operator", "ServiceMonitor"), objects("base", "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"] for port in service["spec"]["ports"]}
    jobs = []
    for endpoint in monitor["spec"]["endpoints"]:
        assert endpoint["port"] in ports
        jobs += [rule["replacement"] for rule in endpoint["relabelings"] if rule.get("targetLabel") == "job"]
    assert jobs == ["ddpobs-runs", "ddpobs-collector"]


def test_the_rules_of_the_operator_are_those_of_prometheus() -> None:
    assert RULES.read_text() == prometheus_rules(), "run `make dashboards`"
    rules = {each["metadata"]["name"]: each["spec"] for each in objects("prometheus-operator", "PrometheusRule")}
    for name in ("rules", "alerts"):
        assert rules[f"ddpobs-{name}"] == yaml.safe_load((PROMETHEUS / f"{name}.yml").read_text())


def test_every_dashboard_is_a_config_map_that_grafanas_sidecar_finds() -> None:
    maps = objects("grafana", "ConfigMap")
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
    texts = {name: text for each in maps for name, text in each["data"].items()}
    assert texts == {path.name: path.read_text() for path in (ROOT / "dashboards" / "grafana").glob("*.json")}

"""Every alert fires and resolves in a real Prometheus and a real Alertmanager, and its mail reads as a mail.

The series of promtool's tests are played to Prometheus: a minute of theirs is a second, and so is one of the rules.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.rig.ports import free_port
from benchmarks.rig.training import ROOT
from tests.support.integration.mail_sink import mail_sink
from tests.support.integration.tools import need

pytestmark = [pytest.mark.alone, pytest.mark.wide]

FOLDER = ROOT / "dashboards" / "prometheus"
FASTER = 60
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
INFO = 'ddpobs_server_info{public_url="https://ddpobs.example",grafana_url="https://grafana.example"}'
RUNS_AND_COLLECTORS = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in RUNS_AND_COLLECTORS for rule in group["rules"]}


def in_seconds(duration: str) -> float:
    return sum(int(count) * SECONDS[unit] for count, unit in re.findall(r"(\d+)([smhd])", duration))


def quick(duration: str) -> str:
    return f"{round(1000 * in_seconds(duration) / FASTER)}ms"


def quick_rules(name: str) -> dict[str, Any]:
    rules: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        expr = re.sub(r"\[(\w+)\]", lambda match: f"[{quick(match[1])}]", rule["expr"]).replace("4 * 3600", "240")
        if "time() -" in expr:
            expr = re.sub(r"> (\d+)$", lambda match: f"> {int(match[1]) / FASTER}", expr)
        rule["expr"] = expr
        for field in ("for", "keep_firing_for"):
            if field in rule:
                rule[field] = quick(rule[field])
    return rules


@dataclass
class Series:
    """A series of promtool's tests: a value each `interval_s` of its own time, None where it has none."""

    name: str
    values: list[float | None]
    interval_s: float

    def at(self, began: float) -> float | None:
        index = int((time.time() - began) * FASTER / self.interval_s)
        value = self.values[index] if index < len(self.values) else None
        is_time = "timestamp_seconds" in self.name
        return value if value is None or not is_time else began + value / FASTER


def expand(notation: str) -> Iterator[float | None]:
    """The values of promtool's notation: `1 2`, `0x3`, `0+60x3`, `100-1x3`, `_`, `_x3`, `stale`."""
    for word in notation.split():
        if word.startswith(("_", "stale")):
            yield from [None] * int(word.partition("x")[2] or 1)
        else:
            match = re.fullmatch(r"(-?[\d.e]+?)(?:([+-][\d.e]+))?(?:x(\d+))?", word)
            assert match, word
            yield from (float(match[1]) + float(match[2] or 0) * index for index in range(int(match[3] or 0) + 1))


def series() -> list[Series]:
    return [
        Series(each["series"], list(expand(str(each["values"]))), in_seconds(test["interval"]))
        for name in ("tests.yml", "collector_tests.yml")
        for test in yaml.safe_load((FOLDER / name).read_text())["tests"]
        for each in test["input_series"]
        if "ddpobs_server_info" not in each["series"]
    ]


@contextmanager
def exporter() -> Iterator[str]:
    """Play all series from the first scrape on; yields the address."""
    played, scrapes = series(), list[float]()

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            scrapes.append(time.time())
            values = [(each.name, each.at(scrapes[0])) for each in played]
            lines = [f"{name} {value}" for name, value in values if value is not None]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write("\n".join([f"{INFO} 1", *dict.fromkeys(lines), ""]).encode())

        def log_message(self, *_: Any) -> None:
            """Keep the output short."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def running(folder: Path, program: str, *options: str) -> Iterator[None]:
    with (folder / f"{program}.log").open("wb") as log:
        process = subprocess.Popen([need(program, program), *options], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def alertmanager_config(smarthost: str) -> dict[str, Any]:
    """The committed configuration with the mail receiver of its comment, and short waits."""
    text = (FOLDER / "alertmanager.yml").read_text()
    (example,) = re.findall(r"# As a mail:\n((?:#  .*\n)+)", text)
    receiver = yaml.safe_load(re.sub(r"^# ", "", example, flags=re.MULTILINE))
    config: dict[str, Any] = yaml.safe_load(text)
    config["templates"] = [str(FOLDER / "mail.tmpl")]
    config["global"] = {"smtp_smarthost": smarthost, "smtp_from": "ddpobs@example.com", "smtp_require_tls": False}
    config["route"] |= {"group_wait": "500ms", "group_interval": "500ms"}
    config["receivers"] = [{"name": "page", **receiver}]
    return config


@pytest.fixture(scope="module")
def mails(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmailMessage]]:
    """The mails of all alerts, from the first one to the end of the last one."""
    folder = tmp_path_factory.mktemp("mails")
    with ExitStack() as stack:
        smarthost, received = stack.enter_context(mail_sink())
        (folder / "alertmanager.yml").write_text(json.dumps(alertmanager_config(smarthost)))
        manager = f"127.0.0.1:{free_port()}"
        options = (f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}", "--cluster.listen-address=")
        stack.enter_context(running(folder, "prometheus-alertmanager", *options, f"--web.listen-address={manager}"))
        for name in ("rules.yml", "alerts.yml"):
            (folder / name).write_text(json.dumps(quick_rules(name)))
        target = stack.enter_context(exporter())
        config = {
            "global": {"scrape_interval": "400ms", "scrape_timeout": "400ms", "evaluation_interval": "200ms"},
            "rule_files": ["rules.yml", "alerts.yml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
            "scrape_configs": [{"job_name": "x", "honor_labels": True, "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        of_data = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
        stack.enter_context(running(folder, "prometheus", *of_data, f"--web.listen-address=127.0.0.1:{free_port()}"))
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and by_status(received)["resolved"] != set(ALERTS):
            time.sleep(0.5)

        yield received


def text_of(mail: EmailMessage) -> str:
    body = mail.get_body(("plain",))
    assert body is not None
    return str(body.get_content()).replace("\r\n", "\n")


def by_status(mails: list[EmailMessage]) -> dict[str, set[str]]:
    """Alerts by the status in the subject of their mails, found by their help and summary."""
    found: dict[str, set[str]] = {"firing": set(), "resolved": set()}
    for mail in list(mails):
        status, summary = re.fullmatch(r"\[(\w+)\] (.*?)(?: \(and \d+ more\))?", mail["Subject"]).groups()  # type: ignore[union-attr]
        found[status] |= {name for name, rule in ALERTS.items() if is_summary(rule["annotations"]["summary"], summary)}
    return found


def is_summary(template: str, text: str) -> bool:
    parts = re.split(r"\{\{.*\}\}" if "{{ if" in template else r"\{\{.*?\}\}", template)
    return re.fullmatch(".*".join(map(re.escape, parts)), text) is not None


def test_every_alert_is_mailed_when_it_fires_and_when_it_resolves(mails: list[EmailMessage]) -> None:
    assert set(ALERTS) - by_status(mails)["firing"] == set()
    assert set(ALERTS) - by_status(mails)["resolved"] == set()


def test_a_mail_has_the_fault_what_to_do_and_absolute_links(mails: list[EmailMessage]) -> None:
    for mail in mails:
        text = text_of(mail)
        assert "<no value>" not in text
        assert "{{" not in text
        assert re.search(r"^help +https://ddpobs\.example/help/[\w-]+$", text, re.MULTILINE), text
        assert re.search(r"^dashboard +https://grafana\.example/d/ddpobs-\w+(\?var-run=\w+)?$", text, re.MULTILINE), (
            text
        )
        assert "run=" not in text or re.search(r"^page +https://ddpobs\.example/runs/\w+$", text, re.MULTILINE), text


def test_communication_beside_a_straggler_is_not_mailed(mails: list[EmailMessage]) -> None:
    subjects = [mail["Subject"] for mail in mails]
    assert "[firing] Run net spends 50% of its steps in moving gradients" in subjects
    assert not [
        subject for subject in subjects if subject.startswith("[firing] Run r spends 40% of its steps in moving")
    ]

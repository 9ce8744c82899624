"""The `ddpobs` command against small HTTP servers."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from ddpobs.export.spool import Encoded, Spool
from tests.integration.collectors import absent, acknowledge, collector, rubbish, status

ROOT = Path(__file__).parents[1]


def ddpobs(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", "from ddpobs.cli import main; main()", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def spool(folder: Path) -> None:
    for seq in range(2):
        Spool(folder, 10**6).put(Encoded("r", "b" * 16, seq, 1, b"x"), seq, lambda *_: None)


def test_push_sends_a_spool_and_empties_it(tmp_path: Path) -> None:
    spool(tmp_path)
    with collector(acknowledge) as server:
        completed = ddpobs("push", str(tmp_path), "--collector", server.url)
    assert (completed.returncode, completed.stdout) == (0, "sent 2, repeated 0, refused 0, left 0\n")
    assert list(tmp_path.iterdir()) == []


def test_push_keeps_batches_that_are_refused_or_not_accepted(tmp_path: Path) -> None:
    spool(tmp_path)
    with collector(status(422)) as server:
        refused = ddpobs("push", str(tmp_path), "--collector", server.url)
    unreachable = ddpobs("push", str(tmp_path), "--collector", absent())
    assert (refused.returncode, refused.stdout) == (1, "sent 0, repeated 0, refused 2, left 0\n")
    assert (unreachable.returncode, unreachable.stdout) == (1, "sent 0, repeated 0, refused 0, left 2\n")
    assert len(list(tmp_path.iterdir())) == 2


def test_run_passes_the_settings_to_the_child() -> None:
    code = "import os; print(os.environ['DDPOBS_TELEMETRY'], os.environ['DDPOBS_RUN'], os.environ['PYTHONPATH'])"
    completed = ddpobs("run", "--collector", "http://c:1", "--run", "x", "--", sys.executable, "-c", code)
    assert completed.stdout.startswith(f"http://c:1 x {ROOT / 'ddpobs' / 'autoload'}{os.pathsep}"), completed.stderr


def test_report_prints_finding_and_remedy_with_control_characters_escaped() -> None:
    finding = {
        "severity": "warning",
        "title": "rank 3 is slow at \x1b[2Ja\nb é",
        "ranks": [3],
        "buckets": [2],
        "parameters": [f"layer.{number}" for number in range(11)],
        "steps": [1, 9],
        "intervals": [
            {"from": 2, "to": 4, "began_ns": 1_700_000_000 * 10**9, "ended_ns": 1_700_000_003 * 10**9},
            *[{"from": 6, "to": 9, "began_ns": 1_700_000_000 * 10**9, "ended_ns": 1_700_100_000 * 10**9}] * 3,
        ],
        "remedy": "look",
        "gain": {"step_ns": 12_750_000, "ratio": 0.25, "error_ratio": 0.02},
    }
    text = json.dumps({"run": "r", "steps_seen": 9, "findings": [finding], "missing": ["epochs: none seen"]}).encode()
    with collector(lambda path: (200, {}, text)) as server:
        completed = ddpobs("report", "r", "--collector", server.url)
    assert completed.stdout == (
        "run r: 9 steps seen, 1 finding\n\n"
        "warning: rank 3 is slow at \\x1b[2Ja\\nb é\n"
        "  where: steps 1 to 9, rank 3, bucket 2\n"
        "  when: steps 2 to 4, 2023-11-14 22:13:20 to 22:13:23 UTC\n"
        "  when: steps 6 to 9, 2023-11-14 22:13:20 to 2023-11-16 02:00:00 UTC\n"
        "  when: steps 6 to 9, 2023-11-14 22:13:20 to 2023-11-16 02:00:00 UTC\n"
        "  when: and 1 more\n"
        "  parameters: layer.0, layer.1, layer.2, layer.3, layer.4, layer.5, layer.6, layer.7 and 3 more\n"
        "  do: look\n"
        "  gain: 12.8 ms a step, 25% of it (± 0.5%)\n\n"
        "not judged: epochs: none seen\n"
    )


def test_report_without_a_run_is_about_the_newest() -> None:
    diagnostics = {"run": "new", "steps_seen": 9, "findings": [], "missing": []}
    answers = {
        "/api/v1/runs?limit=1": {"runs": [{"run": "new"}], "next": "x"},
        "/api/v1/runs/new/diagnostics": diagnostics,
    }
    with collector(lambda path: (200, {}, json.dumps(answers[path]).encode())) as server:
        assert ddpobs("report", "--collector", server.url).stdout == "run new: 9 steps seen, 0 findings\n"
    with collector(lambda path: (200, {}, b'{"runs": [], "next": null}')) as server:
        completed = ddpobs("report", "--collector", server.url)
    assert (completed.returncode, completed.stderr.strip()) == (1, f"ddpobs: no run has reported to {server.url} yet")


def test_trace_saves_the_collectors_document(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, json.dumps({"traceEvents": [path]}).encode())) as server:
        completed = ddpobs("trace", "r", "--steps", "2:5", "-o", str(tmp_path / "t"), "--collector", server.url)
    assert completed.returncode == 0, completed.stderr
    assert json.loads((tmp_path / "t").read_text()) == {"traceEvents": ["/api/v1/runs/r/trace?from=2&to=5"]}


def test_trace_saves_no_file_without_steps(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, b'{"traceEvents": []}')) as server:
        for steps, code, message in ("20:10", 2, "A up to B"), ("20:30", 1, "none of the steps 20 to 30"):
            completed = ddpobs("trace", "r", "--steps", steps, "-o", str(tmp_path / "t"), "--collector", server.url)
            assert completed.returncode == code
            assert message in completed.stderr
    assert not (tmp_path / "t").exists()


def test_a_trace_that_cannot_be_written_is_reported_in_a_line(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, b'{"traceEvents": [1]}')) as server:
        completed = ddpobs(
            "trace", "r", "--steps", "2:5", "-o", str(tmp_path / "none" / "t"), "--collector", server.url
        )
    assert (completed.returncode, completed.stderr) == (
        1,
        f"ddpobs: {tmp_path / 'none' / 't'}: No such file or directory\n",
    )


def test_an_impossible_run_id_is_refused_without_a_request(tmp_path: Path) -> None:
    for command in (["report", "a/b"], ["trace", "..", "--steps", "1:2", "-o", str(tmp_path / "t")]):
        completed = ddpobs(*command, "--collector", absent())
        assert completed.returncode == 2
        assert completed.stderr.startswith("ddpobs: run: expected 1 to 128 of A-Z a-z 0-9 . _ -")


def test_a_refusal_is_printed_with_the_collectors_reason_and_the_remedy() -> None:
    problem = json.dumps({"title": "Token needed", "detail": "send one"}).encode()
    with collector(lambda path: (401, {}, problem)) as server:
        refused = ddpobs("report", "r", "--collector", server.url)
    with collector(lambda path: (502, {}, b"<h1>Bad gateway</h1>")) as server:
        broken = ddpobs("report", "r", "--collector", server.url)
    unreachable = ddpobs("report", "r", "--collector", absent())
    assert refused.stderr.endswith("HTTP 401: Token needed: send one: set DDPOBS_TOKEN\n")
    assert broken.stderr.endswith("HTTP 502: <h1>Bad gateway</h1>\n")
    assert "--collector or DDPOBS_TELEMETRY" in unreachable.stderr
    assert (refused.returncode, broken.returncode, unreachable.returncode) == (1, 1, 1)


def test_the_token_and_the_collectors_host_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_TOKEN", "secret")
    with collector(lambda path: (200, {}, b'{"runs": []}')) as server:
        ddpobs("report", "--collector", f"{server.url}/")
    (headers,) = server.headers
    assert (headers["Host"], headers["Authorization"]) == (server.url.removeprefix("http://"), "Bearer secret")


def test_a_redirect_is_reported_and_not_followed() -> None:
    with collector(lambda path: (302, {"Location": absent()}, b"moved")) as server:
        redirected = ddpobs("report", "r", "--collector", server.url)
    assert (redirected.returncode, redirected.stderr.endswith("HTTP 302: moved\n")) == (1, True)


def test_a_page_that_is_not_a_collectors_is_reported_with_its_start() -> None:
    with collector(rubbish) as server:
        other = ddpobs("report", "r", "--collector", server.url)
    assert other.returncode == 1
    assert other.stderr.endswith("/runs/r/diagnostics: not a collector's reply: <html>welcome</html>\n")


def test_a_collector_that_does_not_answer_is_given_up_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_TIMEOUT_S", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = ddpobs("report", "r", "--collector", f"http://127.0.0.1:{server.getsockname()[1]}")
    assert silent.returncode == 1
    assert "timed out: is this the collector?" in silent.stderr


def test_a_certificate_counts_if_ssl_cert_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with collector(lambda path: (200, {}, b'{"runs": []}'), tls=tls) as server:
        refused = ddpobs("report", "--collector", server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        accepted = ddpobs("report", "--collector", server.url)
    assert "certificate verify failed" in refused.stderr
    assert accepted.stderr == f"ddpobs: no run has reported to {server.url} yet\n"


def test_the_commands_do_not_import_httpx() -> None:
    code = "import sys, ddpobs.cli, ddpobs_server.app; print('httpx' in sys.modules)"
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join((str(ROOT), str(ROOT / "server"))))
    completed = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert completed.stdout == "False\n"


def test_stacks_prints_place_and_stack_of_each_rank() -> None:
    stuck = {
        "phase": "data",
        "step": 40,
        "bucket": -1,
        "activity": "data",
        "waits_in": "",
        "idle_ns": 14 * 10**9,
        "place": "train.py:57 → dataset.py:31 __getitem__",
        "stack": ["train.py:57 <module>", "dataset.py:31 __getitem__"],
    }
    waiting = {"phase": "backward", "step": 40, "bucket": 2, "activity": "bucket", "idle_ns": 0, "stack": []}
    ranks = [
        {"rank": 0, "pulse": waiting},
        {"rank": 1, "host": "node7", "pulse": stuck},
        {"rank": 2, "pulse": None},
        {"rank": 3, "pulse": {"phase": "forward", "step": 3, "bucket": -1}},
    ]
    answers = {"/api/v1/runs/a-run/ranks": {"ranks": ranks}}
    with collector(lambda path: (200, {}, json.dumps(answers[path]).encode())) as server:
        completed = ddpobs("stacks", "a-run", "--collector", server.url)
    no_stack = "  no stack: a rank sends it once it is stuck"
    assert completed.stdout.splitlines() == [
        "rank 0: bucket 2, step 40, no progress for 0 s",
        no_stack,
        "rank 1 on node7: data, step 40, no progress for 14 s (train.py:57 → dataset.py:31 __getitem__)",
        "  train.py:57 <module>",
        "  dataset.py:31 __getitem__",
        "rank 2: no pulse yet",
        "rank 3: forward, step 3, no progress for 0 s",
        no_stack,
    ]

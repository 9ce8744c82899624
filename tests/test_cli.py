from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ddpobs.export.spool import Encoded, Spool
from tests.integration.collectors import absent, acknowledge, collector, status

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
    with collector(acknowledge) as seen:
        done = ddpobs("push", str(tmp_path), "--collector", seen.url)
    assert (done.returncode, done.stdout) == (0, "sent 2, repeated 0, refused 0, left 0\n")
    assert list(tmp_path.iterdir()) == []


def test_push_keeps_what_is_refused_or_not_taken(tmp_path: Path) -> None:
    spool(tmp_path)
    with collector(status(422)) as seen:
        refused = ddpobs("push", str(tmp_path), "--collector", seen.url)
    away = ddpobs("push", str(tmp_path), "--collector", absent())
    assert (refused.returncode, refused.stdout) == (1, "sent 0, repeated 0, refused 2, left 0\n")
    assert (away.returncode, away.stdout) == (1, "sent 0, repeated 0, refused 0, left 2\n")
    assert len(list(tmp_path.iterdir())) == 2


def test_run_gives_the_child_its_settings() -> None:
    code = "import os; print(os.environ['DDPOBS_TELEMETRY'], os.environ['DDPOBS_RUN'], os.environ['PYTHONPATH'])"
    done = ddpobs("run", "--collector", "http://c:1", "--run", "x", "--", sys.executable, "-c", code)
    assert done.stdout.startswith(f"http://c:1 x {ROOT / 'ddpobs' / 'autoload'}{os.pathsep}"), done.stderr


def test_report_names_the_finding_and_the_remedy_and_obeys_no_name() -> None:
    finding = {
        "severity": "warning",
        "title": "rank 3 is slow at \x1b[2Ja\nb é",
        "ranks": [3],
        "buckets": [2],
        "parameters": [f"layer.{number}" for number in range(11)],
        "steps": [1, 9],
        "remedy": "look",
        "gain": {"step_ns": 12_750_000, "ratio": 0.25, "error_ratio": 0.02},
    }
    text = json.dumps({"run": "r", "steps_seen": 9, "findings": [finding], "missing": ["epochs: none seen"]}).encode()
    with collector(lambda path: (200, {}, text)) as seen:
        done = ddpobs("report", "r", "--collector", seen.url)
    assert done.stdout == (
        "run r: 9 steps seen, 1 finding\n\n"
        "warning: rank 3 is slow at \\x1b[2Ja\\nb é\n"
        "  where: steps 1 to 9, rank 3, bucket 2\n"
        "  parameters: layer.0, layer.1, layer.2, layer.3, layer.4, layer.5, layer.6, layer.7 and 3 more\n"
        "  do: look\n"
        "  gain: 12.8 ms a step, 25% of it (± 0.5%)\n\n"
        "not judged: epochs: none seen\n"
    )


def test_report_without_a_run_is_of_the_newest() -> None:
    told = {"run": "new", "steps_seen": 9, "findings": [], "missing": []}
    answers = {"/api/v1/runs?limit=1": {"runs": [{"run": "new"}], "next": "x"}, "/api/v1/runs/new/diagnostics": told}
    with collector(lambda path: (200, {}, json.dumps(answers[path]).encode())) as seen:
        assert ddpobs("report", "--collector", seen.url).stdout == "run new: 9 steps seen, 0 findings\n"
    with collector(lambda path: (200, {}, b'{"runs": [], "next": null}')) as seen:
        done = ddpobs("report", "--collector", seen.url)
    assert (done.returncode, done.stderr.strip()) == (1, f"ddpobs: no run has reported to {seen.url} yet")


def test_trace_saves_what_the_collector_gives(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, json.dumps({"traceEvents": [path]}).encode())) as seen:
        done = ddpobs("trace", "r", "--steps", "2:5", "-o", str(tmp_path / "t"), "--collector", seen.url)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "t").read_text()) == {"traceEvents": ["/api/v1/runs/r/trace?from=2&to=5"]}


def test_trace_saves_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, b'{"traceEvents": []}')) as seen:
        for steps, code, said in ("20:10", 2, "A up to B"), ("20:30", 1, "none of the steps 20 to 30"):
            done = ddpobs("trace", "r", "--steps", steps, "-o", str(tmp_path / "t"), "--collector", seen.url)
            assert done.returncode == code
            assert said in done.stderr
    assert not (tmp_path / "t").exists()


def test_a_trace_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    with collector(lambda path: (200, {}, b'{"traceEvents": [1]}')) as seen:
        done = ddpobs("trace", "r", "--steps", "2:5", "-o", str(tmp_path / "none" / "t"), "--collector", seen.url)
    assert (done.returncode, done.stderr) == (1, f"ddpobs: {tmp_path / 'none' / 't'}: No such file or directory\n")


def test_what_can_be_no_run_is_asked_of_nobody(tmp_path: Path) -> None:
    for command in (["report", "a/b"], ["trace", "..", "--steps", "1:2", "-o", str(tmp_path / "t")]):
        done = ddpobs(*command, "--collector", absent())
        assert done.returncode == 2
        assert done.stderr.startswith("ddpobs: run: expected 1 to 128 of A-Z a-z 0-9 . _ -")


def test_what_the_collector_refuses_is_said_in_its_words_with_what_to_do() -> None:
    problem = json.dumps({"title": "Token needed", "detail": "send one"}).encode()
    with collector(lambda path: (401, {}, problem)) as seen:
        refused = ddpobs("report", "r", "--collector", seen.url)
    with collector(lambda path: (502, {}, b"<h1>Bad gateway</h1>")) as seen:
        broken = ddpobs("report", "r", "--collector", seen.url)
    away = ddpobs("report", "r", "--collector", absent())
    assert refused.stderr.endswith("HTTP 401: Token needed: send one: set DDPOBS_TOKEN\n")
    assert broken.stderr.endswith("HTTP 502: <h1>Bad gateway</h1>\n")
    assert "--collector or DDPOBS_TELEMETRY" in away.stderr
    assert (refused.returncode, broken.returncode, away.returncode) == (1, 1, 1)

"""The `ddpobs` command against small HTTP servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ddpobs as package
from ddpobs.cli import compare as comparing
from ddpobs.cli import main
from ddpobs.cli import runs as listing
from ddpobs.cli.app import wrapped
from ddpobs.export.spool import Encoded, Spool
from tests.support.cli import ROOT, answering, ddpobs, invoke
from tests.support.integration.collectors import Reply, absent, acknowledge, collector, status


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


ACCOUNT = {
    "wall_ns": 90 * 10**9,
    "summary": "25 % of 90 s went into steps that no restart repeated (goodput). Lost: 1.5 rank-minutes.",
    "lost_cost": 0.1125,
    "parts": [
        {"title": "steps: forward", "share": 0.248},
        {"title": "checkpoints", "share": 0.75},
        {"title": "evaluation", "share": 0.002},
    ],
}


@pytest.mark.parametrize("options", [(), ("--collector", "http://c:1")])
def test_run_leaves_telemetry_out_if_the_environment_says_so_and_no_collector_is_given(
    options: tuple[str, ...],
) -> None:
    code = "import os, sys; print(os.environ['DDPOBS_TELEMETRY'], 'autoload' in str(os.environ)); sys.exit(7)"
    completed = ddpobs("run", *options, "--", sys.executable, "-c", code, DDPOBS_TELEMETRY="0")
    assert completed.returncode == 7
    assert completed.stdout.split() == (["http://c:1", "True"] if options else ["0", "False"])
    assert ("no telemetry, because DDPOBS_TELEMETRY is 0" in completed.stderr) is not bool(options)


def test_run_without_telemetry_does_not_mind_a_wrong_setting() -> None:
    off = ddpobs("run", "--", sys.executable, "-c", "print('ran')", DDPOBS_TELEMETRY="0", DDPOBS_FLUSH_S="soon")
    assert (off.returncode, off.stdout) == (0, "ran\n"), off.stderr
    on = ddpobs("run", "--", sys.executable, "-c", "print('ran')", DDPOBS_FLUSH_S="soon")
    assert (on.returncode != 0, on.stdout) == (True, "")


def test_report_prints_the_parts_of_a_finding_with_control_characters_escaped() -> None:
    finding = {
        "code": "straggler",
        "severity": "warning",
        "verdict": "rank 3 is slow at \x1b[2Ja\nb é",
        "measure": "12.8 ms more than the other ranks",
        "when": "steps 2 to 4 (2023-11-14 22:13:20 to 22:13:23 UTC)",
        "cause": "",
        "where": "node-7; bucket 0.2: layer.0, layer.1, layer.2, …",
        "remedy": "look\n",
        "gain": {"text": "12.8 ms of 51 ms a step (25 ± 1 %)"},
        "evidence": {},
    }
    diagnostics = {
        "run": "r",
        "steps_seen": 9,
        "summary": "",
        "findings": [finding],
        "missing": ["epochs: none seen", "order: none seen", "size: one"],
    }
    answers = {"/api/v1/runs/r/diagnostics": diagnostics, "/api/v1/runs/r/account": ACCOUNT}
    with collector(lambda path: (200, {}, json.dumps(answers[path]).encode())) as server:
        completed = ddpobs("report", "r", "--collector", server.url)
    assert completed.stdout == (
        "run r: 1 finding in 9 steps\n"
        "\n"
        "warning: rank 3 is slow at \\x1b[2Ja\\nb é\n"
        "  measure 12.8 ms more than the other ranks\n"
        "  when    steps 2 to 4 (2023-11-14 22:13:20 to 22:13:23 UTC)\n"
        "  where   node-7; bucket 0.2: layer.0, layer.1, layer.2, …\n"
        "  do      look\\n\n"
        "  saves   12.8 ms of 51 ms a step (25 ± 1 %)\n\n"
        "25 % of 90 s went into steps that no restart repeated (goodput). Lost: 1.5 rank-minutes.\n"
        "at the set price the loss is 0.11\n"
        "   75 %  checkpoints\n"
        "   25 %  steps: forward\n\n"
        "not judged: epochs, order: none seen\n"
        "not judged: size: one\n\n"
        f"{server.url}/runs/r\n"
    )


def test_report_without_a_run_is_about_the_newest() -> None:
    summary = "Too short to judge: 9 of 32 steps."
    diagnostics = {"run": "new", "summary": summary, "findings": [], "missing": []}
    answers = {
        "/api/v1/runs?limit=1": {"runs": [{"run": "new"}], "next": "x"},
        "/api/v1/runs/new/diagnostics": diagnostics,
        "/api/v1/runs/new/account": {"wall_ns": None},
    }
    with collector(lambda path: (200, {}, json.dumps(answers[path]).encode())) as server:
        assert ddpobs("report", "--collector", server.url).stdout == (
            f"run new: {summary}\n\nwall time: not known, because no rank has sent an account\n"
            f"\n{server.url}/runs/new\n"
        )
    with collector(lambda path: (200, {}, b'{"runs": [], "next": null}')) as server:
        completed = ddpobs("report", "--collector", server.url)
    assert (completed.returncode, completed.stderr.strip()) == (1, f"ddpobs: no run has reported to {server.url} yet")


LISTED = {"ranks": 2, "steps": 80, "created_ns": 1_700_000_000 * 10**9}
RUNS: list[dict[str, Any]] = [
    {"run": "new", "state": "running", "diagnosis": None} | LISTED,
    {"run": "a-long-name", "state": "failed", "diagnosis": {"worst": "rank 1 is \x1b[2Jslow"}} | LISTED,
    {"run": "old", "state": "finished", "diagnosis": {"worst": None, "summary": "Balanced."}} | LISTED,
]


def test_list_aligns_runs_with_state_and_worst_finding_without_colours_in_a_pipe() -> None:
    diagnosis = {
        "summary": "",
        "findings": [{"code": "processor-bound", "verdict": "All ranks wait", "severity": "info"}],
    }
    answers: dict[str, object] = {"/runs?limit=3&state=failed": {"runs": RUNS}, "/runs/new/diagnostics": diagnosis}
    with collector(answering(answers)) as server:
        done = invoke("list", "--limit", "3", "--state", "failed", "--collector", server.url)
    assert done.stdout.splitlines() == [
        "run          state     ranks  steps  started (UTC)     worst finding",
        "new          running   2      80     2023-11-14 22:13  All ranks wait",
        "a-long-name  failed    2      80     2023-11-14 22:13  rank 1 is \\x1b[2Jslow",
        "old          finished  2      80     2023-11-14 22:13  Balanced.",
    ]


def test_list_on_a_narrow_terminal_leaves_the_finding_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.cli.app.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("NO_COLOR", "1")
    row = ["a", "failed", "2", "80", "2023-11-14 22:13", "Rank 1 failed in forward of step 6"]
    assert listing._table([row], [""]) == [
        "run  state   ranks  steps  worst finding",
        "a    failed  2      80     Rank 1 failed in forwa…",
    ]


def test_list_names_the_command_for_a_run_whose_diagnosis_fails() -> None:
    with collector(answering({"/runs?limit=20": {"runs": RUNS}})) as server:
        done = invoke("list", "--collector", server.url)
    assert "not diagnosed yet: ddpobs report new" in done.stdout.splitlines()[1]


@pytest.mark.parametrize(("state", "worst"), [("failed", "Rank 1 failed"), ("running", "no step yet")])
def test_list_has_the_crash_of_a_run_without_a_step(state: str, worst: str) -> None:
    run = LISTED | {"run": "early", "state": state, "diagnosis": None, "steps": 0}
    crash = {"summary": "", "findings": [{"code": "crash", "verdict": "Rank 1 failed", "severity": "critical"}]}
    answers: dict[str, object] = {"/runs?limit=20": {"runs": [run]}, "/runs/early/diagnostics": crash}
    with collector(answering(answers)) as server:
        done = invoke("list", "--collector", server.url)
    assert done.stdout.splitlines()[1].endswith(worst)


def test_the_help_groups_the_commands_in_the_order_of_their_use() -> None:
    text = invoke("--help", TERM="dumb").stdout
    places = [
        text.index(word) for word in ("─ Train", " run ", "─ Look at a run", " list ", " compare ", "─ Save and send")
    ]
    assert places == sorted(places)
    commands = [line for line in text.splitlines() if re.match(r"│ [a-z]+ +[A-Z]", line)]
    assert len(commands) == 14
    assert all(line.rstrip(" │").endswith(".") for line in commands)  # One line each in 80 columns.


def test_list_as_json_is_the_collectors_list_and_an_empty_one_is_explained() -> None:
    with collector(answering({"/runs?limit=20": {"runs": RUNS}})) as server:
        assert json.loads(invoke("list", "--json", "--collector", server.url).stdout) == RUNS
    with collector(answering({"/runs?limit=20": {"runs": []}})) as server:
        done = invoke("list", "--collector", server.url)
    assert (done.stdout, done.stderr) == ("", f"ddpobs: no run at {server.url} yet\n")


def test_open_shows_the_page_of_a_run(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/opened\n")
    browser.chmod(0o755)
    done = invoke("open", "r", "--collector", "http://c:1/base/", BROWSER=str(browser))
    assert done.stdout == "http://c:1/base/runs/r\n"
    assert (tmp_path / "opened").read_text() == done.stdout


@pytest.mark.parametrize(("fail_on", "code"), [("info", 3), ("warning", 3), ("critical", 0)])
def test_report_fails_on_a_finding_that_is_severe_enough(fail_on: str, code: int) -> None:
    diagnosis = {"run": "r", "steps_seen": 9, "findings": [{"severity": "warning"}], "missing": []}
    answers = {"/runs/r/diagnostics": diagnosis, "/runs/r/account": {"wall_ns": None}}
    with collector(answering(answers)) as server:
        done = invoke("report", "r", "--json", "--fail-on", fail_on, "--collector", server.url)
    assert (done.exit_code, json.loads(done.stdout)) == (code, diagnosis | {"account": {"wall_ns": None}})


def test_report_prints_the_last_lines_of_a_traceback_and_the_errors_of_earlier_attempts() -> None:
    attempts = ["attempt 1: rank 1: CUDA error", "attempt 2: rank 0: no file"]
    traceback = "".join(f"  File a.py, line {line}\n" for line in range(30)) + "OSError: \x1bno file"
    evidence = {"attempts": attempts, "traceback": traceback, "output": None}
    crash = {"code": "crash", "severity": "critical", "verdict": "Rank 0 failed", "evidence": evidence}
    diagnosis = {"run": "r", "steps_seen": 9, "findings": [crash], "missing": [], "summary": ""}
    answers: dict[str, object] = {"/runs/r/diagnostics": diagnosis, "/runs/r/account": {"wall_ns": None}}
    answers["/runs/r/attempts"] = {
        "attempts": [{"outcome": "failed", "began_ns": 1_699_999_990 * 10**9, "ended_ns": 1_700_000_000 * 10**9}]
    }
    with collector(answering(answers)) as server:
        end, *lines = invoke("report", "r", "--collector", server.url).stdout.splitlines()[1:]
    assert end == "failed; ran 2023-11-14 22:13:10–22:13:20 UTC (10 s)"
    assert lines[1:3] == ["critical: Rank 0 failed", "  stack     File a.py, line 11"]
    assert lines[20:23] == [
        "            File a.py, line 29",
        "          OSError: \\x1bno file",
        "  earlier attempt 1: rank 1: CUDA error",
    ]
    assert not any("attempt 2" in line for line in lines)


def test_a_figure_stays_on_the_line_of_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.cli.app.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    lines = wrapped("it spends on the start-up of 12 ranks 64 % of the run")
    assert lines == ["it spends on the start-up of 12 ranks", "64 % of the run"]


def test_on_a_narrow_terminal_the_words_of_a_change_are_below_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    change = {"kind": "step", "title": "step", "a_ns": 1e6, "b_ns": 2e6, "words": "slower by 2.0× (1.9 to 2.1)"}
    wide = comparing._table([change], "")
    assert wide == ["  step      1 ms →     2 ms  slower by 2.0× (1.9 to 2.1)"]
    monkeypatch.setattr("ddpobs.cli.app.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    assert comparing._table([change], "") == ["  step      1 ms →     2 ms", "      slower by 2.0× (1.9 to 2.1)"]


def test_an_unknown_run_is_told_without_an_address_of_the_interface() -> None:
    problem = json.dumps({"title": "Unknown run", "detail": "no run r has reported here"}).encode()
    with collector(lambda _: (404, {}, problem)) as server:
        done = invoke("report", "r", "--collector", server.url)
    told = f"ddpobs: {server.url}: no run r has reported here; `ddpobs list` lists the runs\n"
    assert (done.exit_code, done.stderr) == (1, told)


def test_report_saves_the_collectors_html(tmp_path: Path) -> None:
    file = tmp_path / "report.html"

    def reply(path: str) -> Reply:
        is_html = path == "/api/v1/runs/r/report.html"
        return 200, {}, b"<html>" if is_html else b'{"findings": []}'

    with collector(reply) as server:
        done = invoke("report", "r", "--html", str(file), "--collector", server.url)
    assert (done.exit_code, file.read_text()) == (0, "<html>"), done.output


def test_a_collector_without_html_reports_is_named(tmp_path: Path) -> None:
    def reply(path: str) -> Reply:
        return (404, {}, b"{}") if path.endswith(".html") else (200, {}, b'{"findings": []}')

    with collector(reply) as server:
        done = invoke("report", "r", "--html", str(tmp_path / "f"), "--collector", server.url)
    message = f"ddpobs: {server.url} makes no HTML reports: its version is older than this command's\n"
    assert (done.exit_code, done.stderr) == (1, message)
    assert not (tmp_path / "f").exists()


def test_the_help_of_export_names_the_packages_to_install() -> None:
    assert "pip install 'ddpobs[export]'" in invoke("export", "--help", TERM="dumb").stdout


def test_the_version_is_printed() -> None:
    assert invoke("--version").stdout == f"ddpobs {package.__version__}\n"


def test_the_shell_completes_the_names_of_runs() -> None:
    variables = {"_DDPOBS_COMPLETE": "complete_bash", "COMP_WORDS": "ddpobs report ne", "COMP_CWORD": "2"}
    with collector(answering({"/runs?limit=200": {"runs": RUNS}})) as server:
        done = CliRunner().invoke(main, [], prog_name="ddpobs", env={**variables, "DDPOBS_TELEMETRY": server.url})
        assert done.stdout.split() == ["new"]
    done = CliRunner().invoke(main, [], prog_name="ddpobs", env={**variables, "DDPOBS_TELEMETRY": absent()})
    assert done.stdout.split() == []


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
    ended: dict[str, Any] = {
        "pulse": {"phase": "other", "step": 41, "bucket": -1, "idle_ns": 0},
        "stuck_pulse": stuck | {"threads": {"writer": ["train.py:9 write"]}},
        "ended": "terminated",
    }
    waiting = {"phase": "backward", "step": 40, "bucket": 2, "activity": "bucket", "idle_ns": 0, "stack": []}
    ranks = [
        {"rank": 0, "pulse": waiting},
        {"rank": 1, "host": "node7", "pulse": stuck},
        {"rank": 2, "pulse": None},
        {"rank": 3, "pulse": {"phase": "forward", "step": 3, "bucket": -1}},
        ended | {"rank": 4},
        ended | {"rank": 5, "pulse": {"phase": "forward", "step": 50, "bucket": -1}},
        {"rank": 6, "pulse": waiting | {"module": 1}},
        {"rank": 7, "pulse": waiting, "ended": "finished", "steps": 41},
        {"rank": 8, "pulse": stuck | {"waits_in": "all_reduce", "place": "train.py:57"}, "ended": "imported"},
        {"rank": 9, "pulse": waiting, "ended": "imported"},
    ]
    unit = {"module": 1, "buckets": [{"bucket": 2, "title": "reduce-scatter of unit blocks.3"}]}
    answers = {"/api/v1/runs/a-run/ranks": {"ranks": ranks}, "/api/v1/runs/a-run/layout": {"layouts": [unit]}}
    with collector(lambda path: (200, {}, json.dumps(answers[path]).encode())) as server:
        completed = ddpobs("stacks", "a-run", "--collector", server.url)
    no_stack = "  no stack: a rank sends it once it is stuck"
    assert completed.stdout.splitlines() == [
        "rank 0: bucket 0.2, step 40, no progress for 0 s",
        no_stack,
        "rank 1 on node7: data, step 40, no progress for 14 s (train.py:57 → dataset.py:31 __getitem__)",
        "  train.py:57 <module>",
        "  dataset.py:31 __getitem__",
        "rank 2: no pulse yet",
        "rank 3: forward, step 3, no progress for 0 s",
        no_stack,
        "rank 4: data, step 40, no progress for 14 s until it was ended (train.py:57 → dataset.py:31 __getitem__)",
        "  train.py:57 <module>",
        "  dataset.py:31 __getitem__",
        "  thread writer:",
        "    train.py:9 write",
        "rank 5: forward, step 50, no progress for 0 s",
        no_stack,
        "rank 6: reduce-scatter of unit blocks.3, step 40, no progress for 0 s",
        no_stack,
        "rank 7: finished after 41 steps",
        "rank 8 waits in all_reduce (train.py:57)",
        "  train.py:57 <module>",
        "  dataset.py:31 __getitem__",
        "rank 9: no stack, because its file shows no collective in which it waits",
    ]

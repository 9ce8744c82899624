"""The findings about runs that stand still or crash."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding, Gain, by_severity
from ddpobs_server.analysis.findings.crash import CrashFacts, crash
from ddpobs_server.analysis.findings.hang import HangFacts, hang
from ddpobs_server.analysis.steps.intervals import StepClock

from ddpobs import wire
from tests.support.analysis.failures import (
    Layouts,
    S,
    at,
    evidence,
    failed,
    gave_up,
    gave_up_evidence,
    pulse,
    terminated,
)
from tests.support.analysis.judged import facts_of, only


def test_a_hang_names_rank_phase_bucket_parameters_and_stacks() -> None:
    pulses = {0: pulse("bucket", module=0, bucket=0), 1: pulse("data", phase="data", stack=["a.py:3 f"])}
    finding = only(hang(evidence(pulses=pulses, columns=Layouts(), hosts={1: "node-b"})))
    assert (finding.severity, finding.ranks, finding.phase, finding.buckets) == ("critical", [1], "data", [0])
    assert finding.parameters == ["head.weight"]
    assert finding.cause.endswith("rank 0 waits in bucket 0.0 of step 7")
    assert finding.where == "host node-b, bucket 0.0: head.weight"
    facts = facts_of(HangFacts, finding)
    assert (facts.kind, facts.activities, facts.hosts) == ("absent", {0: "bucket", 1: "data"}, {1: "node-b"})
    assert facts.stacks[1] == ["a.py:3 f"]


def test_a_rank_that_went_silent_and_a_stopped_neighbour_are_told_apart() -> None:
    pulses = {0: pulse("bucket"), 1: pulse("code", idle_ns=0)}
    finding = only(hang(evidence(pulses=pulses, silent_ns={1: 11 * S})))
    assert facts_of(HangFacts, finding).kind == "stopped"
    pulses[0] = pulse("bucket", processes={"1": "gone"})
    assert facts_of(HangFacts, only(hang(evidence(pulses=pulses)))).kind == "dead"


def test_runs_that_go_on_have_crashed_or_run_an_older_client_do_not_hang() -> None:
    stuck = {0: pulse("bucket"), 1: pulse("data")}
    assert hang(evidence(pulses=stuck | {1: pulse("data", idle_ns=S)})) == []
    assert hang(evidence(pulses=stuck, ended={1: "failed"})) == []
    assert hang(evidence(pulses={rank: pulse("", patience_ns=0) for rank in range(2)})) == []


def stuck(rank: int, activity: str, idle_s: int) -> tuple[int, wire.Event]:
    return rank, wire.Event(
        kind="stuck", at_ns=0, step=9, detail={"activity": activity, "idle_ns": idle_s * S, "place": "a.py:3"}
    )


def test_a_hang_that_is_over_stays_with_its_length() -> None:
    finding = only(hang(evidence(events=[stuck(0, "bucket", 30), stuck(1, "data", 23)])))
    assert (finding.severity, finding.ranks, facts_of(HangFacts, finding).length_ns) == ("info", [1], 23 * S)
    assert (finding.verdict, finding.measure) == (
        "The run stood still in step 9 and went on",
        "no progress for 23 s",
    )
    assert finding.cause == "rank 1 was in data (a.py:3), while rank 0 waited in a bucket's reduction"
    facts = facts_of(HangFacts, finding)
    assert facts.places == {}
    assert facts.stacks == {}


def test_a_hang_that_ended_with_the_run_stays_critical() -> None:
    events = [stuck(0, "bucket", 52), stuck(1, "code", 50)]
    for _, event in events:
        event.detail["outcome"] = "ended"
    finding = only(hang(evidence(events=events)))
    assert (finding.severity, finding.ranks) == ("critical", [1])
    assert (finding.verdict, finding.measure) == ("The run hung in step 9 until it was ended", "no progress for 50 s")
    assert finding.cause == "rank 1 was in its own code (a.py:3), while rank 0 waited in a bucket's reduction"


def ended_in_hang(kind: str, **facts: wire.Scalar) -> Evidence:
    """A run in which rank 0 waited for rank 1 from 88 s on, until rank 1 ended at 110 s, and each rank moved then."""
    stuck_pulses = {0: at(108, "bucket", 20, bucket=0), 1: at(108, "code", 20, stack=["a.py:3 f"], threads=WRITER)}
    end = wire.Event(kind=kind, at_ns=0, step=6, detail={"wall_ns": 110 * S, "phase": "other", **facts})
    return evidence(
        events=[(1, end)],
        stuck_pulses=stuck_pulses,
        pulses={rank: at(111, "code", 0) for rank in range(2)},
        processes=[Process(rank, None) for rank in range(2)],
        columns=Layouts(),
        ended={1: "failed"} if kind == "died" else {},
    )


WRITER = {"writer": ["a.py:9 write"]}


@pytest.mark.parametrize(
    ("kind", "number"), [("terminated", "SIGTERM"), ("died", "SIGKILL"), ("interrupted", "SIGINT")]
)
def test_a_hang_that_a_signal_ended_keeps_its_sentence_times_bucket_and_stacks(kind: str, number: str) -> None:
    judged = ended_in_hang(kind, signal=number)
    finding = only([*crash(judged), *hang(judged)])
    assert finding.verdict == "The run hung in step 6, waiting for rank 1"
    assert (finding.measure, finding.when) == (
        f"no progress for 22 s, until {number}",
        "1970-01-01 00:01:28–00:01:50 UTC (22 s)",
    )
    assert (finding.buckets, finding.parameters, finding.where) == ([0], ["head.weight"], "bucket 0.0: head.weight")
    facts = facts_of(HangFacts, finding)
    assert (facts.kind, facts.since_ns, facts.length_ns) == ("absent", None, 22 * S)
    assert [(held.began_ns, held.ended_ns) for held in finding.intervals] == [(88 * S, 110 * S)]
    assert (facts.stacks[1], facts.threads) == (["a.py:3 f"], {1: WRITER})


def test_a_rank_that_the_kernel_killed_while_it_was_waited_for_crashed() -> None:
    judged = ended_in_hang("died", signal="SIGKILL", oom_kills=1)
    assert only(crash(judged)).cause == "its host ran out of memory"


def test_a_stuck_pulse_of_an_earlier_hang_is_no_hang_at_the_end() -> None:
    judged = ended_in_hang("terminated", signal="SIGTERM")
    earlier = {rank: msgspec.structs.replace(pulse, at_ns=60 * S) for rank, pulse in judged.stuck_pulses.items()}
    assert hang(replace(judged, stuck_pulses=earlier)) == []


@pytest.mark.parametrize(("idle_s", "hung"), [(40, False), (80, True)])
def test_a_rank_that_waits_for_a_failed_one_did_not_hang(idle_s: int, hung: bool) -> None:
    waited = stuck(0, "bucket", idle_s)
    waited[1].detail.update(outcome="ended", wall_ns=140 * S, patience_ns=8 * S)
    events = [failed(1, "ValueError", "a bad sample", 100), waited]
    assert bool(hang(evidence(events=events, ended={0: "failed", 1: "failed"}))) == hung


def test_the_rank_with_an_error_of_its_own_failed_first_also_with_a_late_clock() -> None:
    victim = failed(0, "RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]:4711", 5)
    finding = only(crash(evidence(events=[victim, failed(1, "ValueError", "a bad sample\nmore", 6)])))
    assert (finding.verdict, finding.cause) == ("Rank 1 failed in forward of step 6", "ValueError: a bad sample")
    assert finding.measure == "rank 0 failed because of it"
    assert (finding.ranks, finding.phase) == ([1], "forward")
    assert facts_of(CrashFacts, finding).victims.keys() == {0}


def test_a_rank_that_the_launcher_ended_did_not_fail() -> None:
    terminated = (0, wire.Event(kind="terminated", at_ns=0, step=6, detail={"wall_ns": 8 * S, "signal": "SIGTERM"}))
    lost = failed(2, "RuntimeError", "Connection closed by peer", 7)
    finding = only(crash(evidence(events=[failed(1, "ValueError", "a bad sample", 6), terminated, lost])))
    assert finding.measure == "rank 2 failed because of it; rank 0 ended by SIGTERM after it"


def test_a_crash_has_the_time_at_which_its_error_was_raised() -> None:
    finding = only(crash(evidence(events=[failed(1, "ValueError", "a bad sample", 1_700_000_000)])))
    assert finding.when == "2023-11-14 22:13:20 UTC"
    (moment,) = StepClock(*(np.array([5, 7]) * S for _ in range(3))).timed_finding(finding).intervals
    assert (moment.first, moment.began_ns, moment.ended_ns) == (6, 1_700_000_000 * S, 1_700_000_000 * S)
    unknown = only(crash(evidence(events=[failed(1, "ValueError", "a bad sample", 0)])))
    assert (unknown.when, unknown.intervals) == ("", ())


def test_a_crash_names_the_users_line_and_the_first_sentence_of_its_error() -> None:
    place = "train.py:31 → loop.py:9 step"
    error = failed(1, "ValueError", "loss is nan. Look at 3.5 of\nthe data", 6, phase="other", place=place)
    finding = only(crash(evidence(events=[error])))
    assert finding.verdict == "Rank 1 failed in your loop in step 6 (loop.py:9)"
    assert (finding.cause, finding.where) == ("ValueError: loss is nan", "outside of the phases, called at train.py:31")
    assert "The other ranks" not in finding.remedy
    error = failed(1, "ValueError", "no file", 6, phase="other", place="loop.py:9", synchronised=error[1].step + 1)
    assert only(crash(evidence(events=[error]))).verdict == (
        "Rank 1 failed in your loop after backward of step 6 (loop.py:9)"
    )
    first = failed(1, "ValueError", "no file", 6, phase="other", place="train.py:7", synchronised=0)
    first = 1, msgspec.structs.replace(first[1], step=0)
    assert only(crash(evidence(events=[first]))).verdict == "Rank 1 failed before its first backward (train.py:7)"
    early = failed(1, "OSError", "[/a/b.cc:3] no such file: x.pt", 6, stage="init_process_group", place="train.py:7")
    finding = only(crash(evidence(events=[early])))
    assert (finding.verdict, finding.cause) == (
        "Rank 1 failed in init_process_group (train.py:7)",
        "OSError: no such file: x.pt",
    )


def test_an_attempt_that_did_not_connect_names_the_earlier_error() -> None:
    own = failed(1, "ValueError", "bad label", 6, phase="other", place="a.py:3")
    lost = failed(0, "RuntimeError", "Gloo connectFullMesh failed", 9, stage="init_process_group")
    finding = only(crash(evidence(events=[lost], earlier_ends=[[own], [lost]])))
    assert finding.measure == "the same error ended 2 attempts"
    assert finding.remedy.startswith("Correct the error of attempt 1, ValueError: bad label, in your loop")
    alone = only(crash(evidence(events=[lost], earlier_ends=[[lost]])))
    assert "attempt 1" not in alone.remedy


def test_the_same_error_of_several_attempts_is_counted_and_listed() -> None:
    other, same = failed(0, "KeyError", "'x'", 1), failed(1, "OSError", "port 4711", 2, place="a.py:3")
    this = failed(1, "OSError", "port 4712", 3, place="a.py:3")
    finding = only(crash(evidence(events=[this], earlier_ends=[[other], [], [same], [same]])))
    assert finding.measure == "the same error ended 3 attempts"
    assert "another restart" in finding.remedy
    facts = facts_of(CrashFacts, finding)
    assert facts.same_error == 3
    assert facts.attempts[:2] == [
        "attempt 1: rank 0: KeyError: 'x', in forward of step 6",
        "attempt 2: no end was reported",
    ]
    once = only(crash(evidence(events=[this], earlier_ends=[[same], [other]])))
    assert (once.measure, facts_of(CrashFacts, once).same_error) == ("", 1)


def test_a_broken_connection_sends_to_the_log_of_the_rank_that_reported_no_end() -> None:
    victims = [failed(rank, "RuntimeError", "Connection closed by peer", 5) for rank in (0, 2)]
    hosts = {0: "a", 2: "b"}
    finding = only(crash(evidence(events=victims, world_size=3, hosts=hosts)))
    assert finding.remedy == "Look at the log of rank 1 first: no end has been reported from there."
    all_reported = only(crash(evidence(events=victims, world_size=3, hosts=hosts, ended={1: "finished"})))
    assert "the connection between the hosts" in all_reported.remedy


def test_a_crash_that_ended_a_hang_shows_the_hangs_bucket_times_and_stacks() -> None:
    """The launcher's SIGTERM and the error itself come before the last pulses, which show no hang any more."""
    stuck_pulses = {0: at(99, "bucket", 13, bucket=0), 1: at(99, "code", 13, stack=["a.py:3 f"])}
    later = {"r0": at(103, "code", 0, bucket=1), "r1": at(103, "code", 0, bucket=1)}
    judged = replace(gave_up_evidence(gave_up(0), terminated(1, 101), **later), stuck_pulses=stuck_pulses)
    finding = only([*crash(judged), *hang(judged)])
    assert (finding.verdict, finding.buckets) == ("Rank 0 ended in step 6, waiting for rank 1", [0])
    assert (finding.when, finding.parameters) == ("1970-01-01 00:01:26–00:01:40 UTC (14 s)", ["head.weight"])
    assert facts_of(CrashFacts, finding).stacks == {1: ["a.py:3 f"]}


def test_a_process_that_died_without_a_word_comes_before_its_victims() -> None:
    died = (
        1,
        wire.Event(
            kind="died", at_ns=0, step=8, detail={"wall_ns": 9 * S, "phase": "backward", "module": 0, "bucket": 2}
        ),
    )
    victim = failed(0, "RuntimeError", "Connection reset by peer", 5)
    finding = only(crash(evidence(events=[victim, died])))
    assert finding.verdict == "Rank 1 ended without an error in backward of step 8"
    assert finding.cause.startswith("not known: it was killed")
    assert finding.where == "bucket 0.2"
    assert finding.buckets == [2]


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        ({"signal": "SIGSEGV"}, "Rank 1 was killed in backward of step 8: {at}SIGSEGV"),
        ({"exit_status": 3}, "Rank 1 ended without an error in backward of step 8: {at}exit status 3"),
        (
            {"signal": "SIGKILL", "oom_kills": 1},
            "Rank 1 was killed in backward of step 8: {at}its host ran out of memory",
        ),
    ],
)
def test_the_exit_that_any_report_of_a_death_has_is_named(facts: dict[str, str | int], title: str) -> None:
    at: dict[str, str | int] = {"wall_ns": 9 * S, "phase": "backward"}
    early = (1, wire.Event(kind="died", at_ns=0, step=8, detail={**at, "oom_kills": facts.get("oom_kills", 0)}))
    late = (1, wire.Event(kind="died", at_ns=0, step=8, detail={**at, **facts}))
    for events in ([early, late], [late, early]):
        assert only(crash(evidence(events=events))).title == title.format(at="1970-01-01 00:00:09 UTC; cause: ")


def test_broken_connections_alone_name_no_culprit_and_a_terminated_run_did_not_crash() -> None:
    finding = only(crash(evidence(events=[failed(0, "DistBackendError", "timed out", 5)])))
    assert "no rank reported an error of its own" in finding.cause
    terminated = (0, wire.Event(kind="terminated", at_ns=0, step=6, detail={"signal": "SIGTERM"}))
    assert crash(evidence(events=[terminated])) == []


def test_a_hang_that_only_waiting_ranks_recorded_names_them_as_waiting() -> None:
    waited = stuck(0, "bucket", 14)
    waited[1].detail["outcome"] = "ended"
    assert only(hang(evidence(events=[waited]))).cause == "rank 0 waited in a bucket's reduction"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("ConnectionError", "HTTPSConnectionPool: Max retries exceeded: Connection refused"),
        ("TimeoutError", "timed out"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("RuntimeError", "DataLoader timed out after 60 seconds"),
    ],
)
def test_a_connection_of_the_scripts_own_that_fails_is_a_failure_of_its_rank(error: str, message: str) -> None:
    victim = failed(1, "RuntimeError", "[gloo] Connection closed by peer", 9)
    finding = only(crash(evidence(events=[victim, failed(0, error, message, 9)])))
    assert (finding.verdict, finding.cause) == ("Rank 0 failed in forward of step 6", f"{error}: {message}")


def test_a_single_rank_that_was_terminated_is_named_with_its_signal() -> None:
    detail: dict[str, wire.Scalar] = {"wall_ns": 4 * S, "phase": "forward", "signal": "SIGTERM"}
    terminated = (1, wire.Event(kind="terminated", at_ns=0, step=6, detail=detail))
    finding = only(crash(evidence(events=[failed(0, "RuntimeError", "Connection closed by peer", 5), terminated])))
    assert (finding.verdict, finding.cause) == ("Rank 1 was terminated in forward of step 6", "SIGTERM")
    assert finding.measure == "rank 0 failed because of it"
    assert "signal" in finding.remedy


def test_a_crash_and_a_hang_come_before_other_critical_findings_whatever_their_gain() -> None:
    gain = Gain(step_ns=S, ratio=0.9, error_ratio=0)
    codes = ("straggler", "replicas-differ", "hang", "not-reduced", "crash", "comm-bound")
    listed = [Finding(code, "critical", "", "", (0, 0), gain=gain if code == "straggler" else None) for code in codes]
    over = Finding("hang", "info", "", "", (0, 0))
    order = [finding.code for finding in by_severity([over, *listed])]
    assert order == ["crash", "hang", "not-reduced", "replicas-differ", "straggler", "comm-bound", "hang"]

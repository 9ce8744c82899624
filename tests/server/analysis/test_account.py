"""The account of a run: parts that add up exactly, whatever the processes report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.account.run_account import Launch, account_of
from hypothesis import given
from hypothesis import strategies as st

from ddpobs import wire
from tests.support.analysis.accounts import S, phases, process, seconds

TIMES = st.integers(0, 100 * S)


def launch(*processes: Process, attempt: str = "a", ordinal: int = 0, completed: bool = True, size: int = 2) -> Launch:
    return Launch(attempt, ordinal, size, processes, completed)


accounts = st.builds(
    wire.Account,
    started_ns=st.none() | TIMES,
    imported_ns=TIMES,
    ready_ns=TIMES,
    until_ns=TIMES,
    steps=st.integers(0, 1000),
    phases_ns=st.lists(TIMES, min_size=6, max_size=6),
    prepare_ns=TIMES,
    first_batch_ns=TIMES,
    compile_ns=TIMES,
    compile_phases_ns=st.lists(TIMES, min_size=6, max_size=6) | st.just([]),
    recompile_ns=TIMES,
    outside=st.lists(
        st.builds(
            wire.Outside,
            kind=st.sampled_from(["evaluation", "checkpoint", "after_checkpoint", "waiting"]),
            total_ns=TIMES,
            count=st.just(1),
        ),
        max_size=4,
    ),
    between_ns=TIMES,
    unrecorded_ns=TIMES,
    open_step_ns=TIMES,
    finished=st.booleans(),
    checkpoint_step=st.integers(-1, 1000),
)
processes = st.builds(Process, rank=st.integers(0, 3), account=accounts, wall_offset_ns=TIMES, stuck_ns=TIMES)


@given(st.lists(st.lists(processes, min_size=1, max_size=6), min_size=1, max_size=3), st.booleans())
def test_the_parts_add_up_to_the_wall_time_of_every_rank_attempt_and_run(
    attempts: list[list[Process]], completed: bool
) -> None:
    account = account_of([Launch(str(n), n, 4, each, completed) for n, each in enumerate(attempts)])
    assert sum(account.parts.values()) == account.rank_ns
    for attempt in account.attempts:
        assert sum(attempt.parts.values()) == attempt.rank_ns
        for parts in attempt.by_rank.values():
            assert sum(parts.values()) == attempt.until_ns - attempt.began_ns
            assert min(parts.values(), default=0) >= 0


def test_the_time_of_one_rank_is_divided_into_its_parts() -> None:
    fields: dict[str, Any] = {
        "phases_ns": phases(data=4, forward=20, backward=30),
        "steps": 10,
        "first_batch_ns": 3 * S,
    }
    account = account_of([launch(process(0, outside={"checkpoint": 15, "evaluation": 6}, **fields), size=1)])
    expected = {"import": 5, "model": 5, "first_batch": 3, "data": 1, "forward": 20, "backward": 30}
    assert seconds(account) == expected | {"checkpoint": 15, "evaluation": 6, "unexplained": 15}
    assert account.goodput == 0.51


def test_a_rank_that_waits_in_its_step_for_a_checkpoint_of_another_has_no_exposed_communication() -> None:
    saves = process(0, outside={"checkpoint": 40}, phases_ns=phases(backward=50), steps=10)
    waits = process(1, phases_ns=phases(backward=50, exposed_comm=40), steps=10)
    (attempt,) = account_of([launch(saves, waits)]).attempts
    assert attempt.by_rank[1]["waiting_in_steps"] == 40 * S
    assert attempt.by_rank[1]["exposed_comm"] == 0
    assert attempt.goodput == 0.5


def test_exposed_communication_is_waiting_as_far_as_no_data_moved() -> None:
    exposed = {0: 50, 1: 10}
    fast, slow = (
        process(rank, phases_ns=phases(backward=60 - s, exposed_comm=s), steps=10) for rank, s in exposed.items()
    )
    measured = replace(launch(fast, slow), moving_ns={0: 0.5 * S, 1: 0.5 * S})
    (attempt,) = account_of([measured]).attempts
    assert [attempt.by_rank[rank].get("waiting_for_ranks", 0) / S for rank in (0, 1)] == [45, 5]
    assert [attempt.by_rank[rank]["exposed_comm"] / S for rank in (0, 1)] == [5, 5]
    (unmeasured,) = account_of([launch(fast, slow)]).attempts
    assert [unmeasured.by_rank[rank].get("waiting_for_ranks", 0) / S for rank in (0, 1)] == [40, 0]
    assert unmeasured.goodput == attempt.goodput == 0.6


def test_waiting_for_a_rank_without_telemetry_is_not_told_from_moving_data() -> None:
    ranks = [process(rank, phases_ns=phases(exposed_comm=s), steps=10) for rank, s in ((0, 50), (1, 10))]
    (attempt,) = account_of([launch(*ranks, size=3)]).attempts
    assert "waiting_for_ranks" not in attempt.parts


def test_a_compilation_in_mid_run_is_no_start_up_and_the_other_rank_waits_for_it() -> None:
    compiled: dict[str, Any] = {
        "compile_ns": 50 * S,
        "compile_phases_ns": phases(forward=10, other=40),
        "recompile_ns": 30 * S,
    }
    compiles = process(0, phases_ns=phases(forward=30, other=50), steps=100, **compiled)
    waits = process(1, phases_ns=phases(forward=20, exposed_comm=40), steps=100)
    (attempt,) = account_of([launch(compiles, waits)]).attempts
    first, other = ({part: ns / S for part, ns in attempt.by_rank[rank].items()} for rank in (0, 1))
    assert (first["recompile"], first["compile"], first["forward"], first["other"]) == (30, 20, 20, 10)
    assert other["waiting_for_compile"] == 30
    assert attempt.goodput == 0.3


def test_an_older_client_reports_no_phases_of_its_compilations() -> None:
    (attempt,) = account_of(
        [launch(process(0, phases_ns=phases(forward=30, backward=20), compile_ns=35 * S), size=1)]
    ).attempts
    assert (seconds(attempt)["compile"], seconds(attempt)["backward"]) == (35, 15)
    assert "forward" not in attempt.parts


def test_steps_after_the_last_checkpoint_of_a_failed_attempt_are_repeated() -> None:
    fields: dict[str, Any] = {"phases_ns": phases(backward=80), "steps": 100, "checkpoint_step": 75}
    first = launch(process(0, **fields), completed=False, size=1)
    later = process(
        0,
        phases_ns=phases(backward=90),
        steps=100,
        started_ns=130 * S,
        imported_ns=130 * S,
        ready_ns=130 * S,
        until_s=220,
    )
    account = account_of([first, launch(later, attempt="b", ordinal=1, size=1)])
    assert account.attempts[0].repeated_steps == 25
    assert seconds(account)["repeated_steps"] == 20
    assert seconds(account)["restart"] == 30
    assert account.goodput == 150 / 220


def test_a_restart_without_a_step_has_repeated_none() -> None:
    fields: dict[str, Any] = {"phases_ns": phases(backward=80), "steps": 100}
    first = launch(process(0, **fields), completed=False, size=1)
    began: dict[str, Any] = dict.fromkeys(("started_ns", "imported_ns", "ready_ns"), 130 * S)
    at_once = launch(process(0, **began, until_s=220), attempt="b", ordinal=1, completed=False, size=1)
    account = account_of([first, at_once])
    assert account.attempts[0].repeated_steps == 0
    assert (account.goodput, "repeated_steps" in account.parts) == (80 / 220, False)
    third = dict.fromkeys(began, 230 * S)
    training = launch(process(0, **fields | third, until_s=320), attempt="c", ordinal=2, size=1)
    assert account_of([first, at_once, training]).attempts[0].repeated_steps == 100


def test_a_rank_without_an_account_is_not_known_with_its_reason() -> None:
    absent = Process(1, None, reason="no batch has arrived from it")
    (attempt,) = account_of([launch(process(0), absent)]).attempts
    assert seconds(attempt)["not_known"] == 100
    assert attempt.missing == {1: "no batch has arrived from it"}
    assert account_of([launch(absent)]).goodput is None


def test_a_stuck_rank_is_not_in_a_step() -> None:
    (attempt,) = account_of([launch(process(0, open_step_ns=60 * S, stuck_s=50), size=1)]).attempts
    assert (seconds(attempt)["stuck"], seconds(attempt)["open_step"]) == (50, 10)


def test_a_rank_that_hangs_after_a_save_does_not_save() -> None:
    saved, after = (
        wire.OutsideInterval(9, 10, 38 * S, 40 * S, 2 * S),
        wire.OutsideInterval(9, 10, 40 * S, 99 * S, 59 * S),
    )
    outside = [
        wire.Outside(kind="checkpoint", total_ns=2 * S, count=1, intervals=[saved]),
        wire.Outside(kind="after_checkpoint", total_ns=59 * S, count=1, intervals=[after]),
    ]
    (attempt,) = account_of(
        [launch(process(0, outside=outside, steps=10, stuck_s=58, open_step_ns=S), size=1)]
    ).attempts
    assert (seconds(attempt)["stuck"], seconds(attempt)["checkpoint"]) == (58, 4)


def test_a_rank_whose_wall_clock_is_an_hour_ahead_is_no_idle_hour() -> None:
    ahead = replace(process(1), wall_offset_ns=3600 * S)
    (attempt,) = account_of([launch(process(0), ahead)]).attempts
    assert attempt.until_ns - attempt.began_ns == 100 * S
    assert "idle" not in attempt.parts


def test_a_rank_that_started_half_a_minute_later_was_not_there_before() -> None:
    (attempt,) = account_of([launch(process(0), replace(process(1), wall_offset_ns=30 * S))]).attempts
    assert seconds(attempt)["idle"] == 60


def test_the_last_step_of_a_failed_process_is_no_goodput() -> None:
    failed = replace(process(0, open_step_ns=60 * S), failed=True)
    (attempt,) = account_of([launch(failed, size=1)]).attempts
    assert (seconds(attempt)["unfinished_step"], attempt.goodput) == (60, 0)

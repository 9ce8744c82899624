"""The verdict on a hang, from pulses made by hand; the runs that hang by real means are in tests/integration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpobs import wire
from ddpobs.shared.hang_verdict import BUFFERS, Hang, judge
from ddpobs.shared.judged_rank import JudgedRank

S = 10**9


def state(rank: int, activity: str = "code", *, idle_s: float = 12, silent_s: float = 0, **facts: Any) -> JudgedRank:
    ended, process = facts.pop("ended", ""), facts.pop("process", "")
    fields: dict[str, Any] = {
        "activity": activity,
        "phase": "other",
        "step": 12,
        "synchronised": 12,
        "collectives": 0,
        "place": "train.py:30",
    }
    pulse = wire.Pulse(
        at_ns=0,
        idle_ns=int(idle_s * S),
        patience_ns=8 * S,
        **(fields | facts),
    )
    return JudgedRank(rank, pulse, int(silent_s * S), ended, process)


def bucket(rank: int, number: int = 2, **facts: Any) -> JudgedRank:
    return state(rank, "bucket", **{"phase": "backward", "module": 0, "bucket": number, **facts})


def verdict(*states: JudgedRank) -> Hang:
    names = ("decoder.4.weight", "decoder.4.bias", "head.weight", "head.bias")
    parameters = [wire.Parameter(name=name, size=1) for name in names]
    hang = judge(states, lambda *_: wire.Bucket(size_bytes=16, dtype="float32", parameters=parameters))
    assert hang is not None
    return hang


def test_a_rank_in_its_data_loader_is_named_with_its_line_and_the_others_with_their_bucket() -> None:
    hang = verdict(bucket(0), state(1, "data", idle_s=14, place="train.py:57 → dataset.py:31 __getitem__"), bucket(2))
    assert (hang.kind, hang.ranks, hang.waiting, hang.bucket, hang.step) == ("absent", [1], [0, 2], 2, 12)
    assert (hang.verdict, hang.measure) == ("The run hangs in step 12, waiting for rank 1", "no progress for 12 s")
    assert hang.cause == (
        "rank 1 has been in the data loader for 14 s (train.py:57 → dataset.py:31 __getitem__); "
        "ranks 0 and 2 wait in bucket 0.2 of step 12"
    )
    assert hang.where == "bucket 0.2: decoder.4.weight, decoder.4.bias, head.weight, …"
    assert hang.line == f"{hang.verdict}: {hang.measure}; cause: {hang.cause} ({hang.where}). {hang.remedy}"


def test_the_cause_of_a_hang_that_has_ended_is_in_the_past() -> None:
    def cause(*states: JudgedRank) -> str:
        return verdict(*(replace(each, is_past=True) for each in states)).cause

    assert cause(bucket(0), state(1, "data", idle_s=14)) == (
        "rank 1 had been in the data loader for 14 s (train.py:30); rank 0 waited in bucket 0.2 of step 12"
    )
    assert cause(bucket(0), bucket(1)) == "each rank waited for the others in bucket 0.2 of step 12"
    assert cause(bucket(0), state(1, process="gone")).startswith("the process of rank 1 was gone")
    assert cause(bucket(0), state(1, process="stopped")).startswith("the process of rank 1 was stopped")
    assert cause(state(0, "data"), state(1, "data")).startswith("no rank got a batch; ranks 0 and 1 had been in ")
    mismatch = cause(*(state(rank, "collective", waits_in=name) for rank, name in enumerate(("barrier", "gather"))))
    assert mismatch.startswith("the ranks waited in different collectives: ")


def test_a_headline_has_twelve_words_however_many_ranks_are_missing() -> None:
    for missing, named in (([1, 2], "ranks 1 and 2"), ([1, 2, 3], "3 ranks")):
        hang = verdict(bucket(0), *(state(rank, "data", idle_s=14) for rank in missing))
        assert hang.verdict == f"The run hangs in step 12, waiting for {named}"
        assert len(hang.verdict.split()) <= 12


def test_a_run_of_which_one_rank_goes_on_does_not_hang() -> None:
    assert judge([bucket(0), state(1, "code", idle_s=3)]) is None


def test_a_checkpoint_and_a_compilation_are_progress() -> None:
    for activity in ("checkpoint", "compile"):
        assert judge([state(0, activity, idle_s=200), state(1, "collective", waits_in="barrier", idle_s=200)]) is None


def test_a_rank_without_a_pulse_yet_may_still_start() -> None:
    assert judge([bucket(0), JudgedRank(1, None)]) is None


def test_a_rank_that_sends_nothing_is_named() -> None:
    hang = verdict(bucket(0), state(1, "code", idle_s=0, silent_s=13))
    assert (hang.kind, hang.ranks) == ("stopped", [1])
    assert hang.cause.startswith("rank 1 sent nothing for 13 s (last in other of step 12); rank 0 waits in bucket 0.2")


def test_a_rank_that_has_just_become_silent_is_named_once_a_rank_of_its_host_had_time_to_look() -> None:
    waiting, silent = replace(bucket(0), host="a"), replace(state(1, silent_s=11), host="a")
    assert judge([waiting, silent]) is None
    assert verdict(waiting, replace(silent, process="stopped")).cause.startswith("the process of rank 1 is stopped")
    assert verdict(waiting, replace(silent, host="b")).cause.startswith("rank 1 sent nothing for 11 s")
    assert verdict(waiting, replace(silent, silent_ns=15 * S)).cause.startswith("rank 1 sent nothing for 15 s")


def test_a_stopped_and_a_dead_process_are_told_apart_by_a_rank_of_the_same_host() -> None:
    assert verdict(bucket(0), state(1, idle_s=9, process="stopped")).kind == "stopped"
    assert verdict(bucket(0), state(1, idle_s=9, process="gone")).kind == "dead"


def test_a_rank_that_ended_its_training_leaves_the_others_waiting() -> None:
    hang = verdict(bucket(0), state(1, ended="finished", silent_s=9))
    assert (hang.kind, hang.ranks) == ("absent", [1])
    assert hang.cause.startswith("rank 1 has ended its training; rank 0 waits in bucket 0.2")
    assert "the same number of steps" in hang.remedy


def test_a_rank_that_has_just_ended_in_order_was_waited_for_until_now() -> None:
    assert judge([bucket(0), state(1, ended="finished", silent_s=1)]) is None
    assert judge([bucket(0), state(1, ended="failed", silent_s=1)]) is not None


def test_ranks_in_the_same_collective_wait_for_the_link() -> None:
    hang = verdict(bucket(0), bucket(1), bucket(2))
    assert (hang.kind, hang.ranks) == ("link", [0, 1, 2])


def test_ranks_of_one_host_are_never_sent_to_the_network() -> None:
    near, far = [replace(bucket(rank), host="a") for rank in range(2)], replace(bucket(2), host="b")
    assert "All ranks share a host" in verdict(*near).remedy
    assert verdict(*near, far).remedy.startswith("Look at the connections between the hosts")
    assert verdict(bucket(0), bucket(1)).remedy.startswith("Look at the connections between the hosts")


def test_collectives_of_other_threads_are_named_beside_the_training_threads() -> None:
    threads: dict[str, Any] = {
        "waits_in": "barrier",
        "collectives": 1,
        "other_waits": ["all_reduce of the default group in thread writer"],
    }
    for rank in range(2):
        hang = verdict(*(state(each, "collective", **threads) for each in range(rank + 1)), bucket(2, synchronised=12))
        assert hang.kind == "mismatch"
    hang = verdict(state(0, "collective", **threads), state(1, "collective", **threads))
    assert (hang.kind, hang.ranks) == ("mismatch", [0, 1])
    assert hang.cause.endswith(
        "in barrier after step 12; ranks 0 and 1 also in all_reduce of the default group in thread writer"
    )
    assert "a process group of its own" in hang.remedy


def test_a_rank_with_one_backward_fewer_is_the_odd_one_of_two() -> None:
    hang = verdict(
        bucket(0, synchronised=20), state(1, "collective", waits_in="barrier", collectives=1, synchronised=19)
    )
    assert (hang.kind, hang.ranks) == ("mismatch", [1])
    assert "rank 1 in barrier after step 12 (train.py:30)" in hang.cause
    assert hang.cause.endswith("rank 1 ran 1 backward pass fewer than the others")


def test_the_smaller_group_of_a_mismatch_is_named() -> None:
    hang = verdict(
        bucket(0), bucket(1), state(2, "collective", waits_in="all_reduce", collectives=1, synchronised=11), bucket(3)
    )
    assert (hang.kind, hang.ranks, hang.waiting) == ("mismatch", [2], [0, 1, 2, 3])


def test_a_rank_that_has_passed_the_others_collective_shows_a_cut_link() -> None:
    for ahead in (
        bucket(0, 3, synchronised=20),
        bucket(0, 0, synchronised=21, collectives=5, buffer_broadcasts=21),
        state(0, "collective", waits_in=BUFFERS, buffer_broadcasts=21, synchronised=20),
        state(0, "collective", waits_in="all_reduce", collectives=6, synchronised=20),
    ):
        hang = verdict(ahead, bucket(1, 2, synchronised=20, collectives=5, buffer_broadcasts=20))
        assert (hang.kind, hang.ranks) == ("link", [0, 1])
        assert "in bucket 0.2 of step 12" in hang.cause
    ahead = bucket(0, synchronised=20, collectives=5, buffer_broadcasts=20)
    for behind in (
        state(1, "collective", waits_in="all_reduce", collectives=5, synchronised=19),
        state(1, "collective", waits_in=BUFFERS, buffer_broadcasts=20, synchronised=19),
    ):
        assert verdict(ahead, behind).kind == "link"


def test_a_rank_in_an_evaluation_of_its_own_is_mismatched() -> None:
    training = bucket(0, synchronised=20, buffer_broadcasts=20)
    alone = state(1, "collective", waits_in=BUFFERS, buffer_broadcasts=21, synchronised=19)
    hang = verdict(training, alone)
    assert (hang.kind, hang.ranks) == ("mismatch", [1])


def test_a_collective_inside_a_backward_does_not_prove_that_the_backward_ended() -> None:
    inside = state(1, "collective", waits_in="all_reduce", collectives=1, synchronised=20, phase="backward")
    assert verdict(bucket(0, synchronised=20), inside).kind == "mismatch"


def test_a_model_that_only_serves_does_not_hang() -> None:
    assert judge([state(0, synchronised=0), state(1, synchronised=0)]) is None
    assert verdict(state(0, synchronised=1), state(1, synchronised=1)).kind == "code"


def test_no_rank_with_a_batch_is_an_input_hang() -> None:
    hang = verdict(state(0, "data", phase="data"), state(1, "data", phase="data"))
    assert (hang.kind, hang.ranks, hang.phase) == ("input", [0, 1], "data")


def test_a_run_that_ended_or_is_lost_as_a_whole_does_not_hang() -> None:
    assert judge([state(0, ended="finished"), state(1, ended="finished")]) is None
    assert judge([state(0, silent_s=40), state(1, silent_s=40)]) is None


def test_a_wait_in_a_fully_sharded_model_is_named_by_its_unit_and_collective() -> None:
    weight = wire.Parameter(name="blocks.3.weight", size=1)
    unit = wire.Bucket(size_bytes=4, dtype="float32", parameters=[weight], kind="all_gather", unit="blocks.3")
    hang = judge([bucket(0), state(1, "code")], lambda *_: unit)
    assert hang is not None
    assert hang.cause.endswith("rank 0 waits in the all-gather of unit blocks.3 of step 12")
    assert hang.where == "all-gather of unit blocks.3: blocks.3.weight"

"""Dumps of the Flight Recorder: who is missing in a collective, and files that are no dumps."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddpobs import wire
from ddpobs.errors import TraceFileError
from ddpobs.imports.dump_verdicts import verdicts
from ddpobs.imports.dumped_run import DumpedRun
from ddpobs.imports.files import encoded
from ddpobs.imports.flight_recorder import Entry, RankDump, is_dump, read

GROUP = ("0", "default_pg")


def entry(number: int, **fields: Any) -> dict[str, Any]:
    """Fields of an entry of a collective that is over."""
    over = {"process_group": GROUP, "collective_seq_id": number, "profiling_name": "nccl:all_reduce", "retired": True}
    return over | fields


def dump(rank: int, calls: int, members: list[int] | None = None, **last: Any) -> RankDump:
    """A rank that has left all of its collectives but the last one."""
    numbers = [*map(entry, range(1, calls)), entry(calls, retired=False, state="started") | last]
    return RankDump(f"rank_{rank}", rank, msgspec.convert(numbers, list[Entry]), {GROUP[0]: members or []})


def test_a_rank_that_did_not_come_is_named_with_its_last_call() -> None:
    (verdict,) = verdicts([dump(0, 9), dump(1, 8, retired=True), dump(2, 9)])
    assert verdict.verdict == "The ranks hang in all_reduce 9 of group default_pg, waiting for rank 1"
    assert verdict.cause == "rank 1 last called all_reduce 8; ranks 0 and 2 wait in all_reduce 9"
    assert verdict.ranks == [1]


def test_different_collectives_of_one_number_name_no_rank() -> None:
    (verdict,) = verdicts([dump(0, 9), dump(1, 9, profiling_name="nccl:broadcast")])
    assert verdict.verdict == "The ranks called different collectives as number 9 of group default_pg"
    assert verdict.ranks == []


def test_ranks_that_have_all_entered_blame_none() -> None:
    (verdict,) = verdicts([dump(0, 9), dump(1, 9)])
    assert verdict.verdict == "The ranks hang in all_reduce 9 of group default_pg"
    assert verdict.cause == "every rank has entered it; ranks 0 and 1 wait in all_reduce 9"


def test_a_rank_without_a_dump_is_told_and_not_judged() -> None:
    (verdict,) = verdicts([dump(0, 9, members=[0, 1, 2]), dump(1, 9)])
    assert verdict.ranks == []
    assert verdict.cause == "ranks 0 and 1 wait in all_reduce 9; no dump has a call of rank 2"


def test_a_rank_that_waits_further_on_has_called_nothing_different() -> None:
    (verdict,) = verdicts([dump(0, 9), dump(1, 10, profiling_name="nccl:broadcast")])
    assert verdict.verdict == "The ranks hang in all_reduce 9 of group default_pg"
    assert verdict.cause.endswith("rank 0 waits in all_reduce 9; rank 1 is in a later one, broadcast 10")


def test_a_dump_without_a_call_of_the_group_leaves_its_rank_unknown() -> None:
    empty = RankDump("rank_2", 2, [], {})
    (verdict,) = verdicts([dump(0, 9, members=[0, 1, 2]), dump(1, 9), empty])
    assert (verdict.ranks, verdict.cause) == ([], "ranks 0 and 1 wait in all_reduce 9; no dump has a call of rank 2")


def test_a_run_that_went_on_has_no_verdict() -> None:
    assert verdicts([dump(0, 9, retired=True), dump(1, 9, state="completed")]) == []


def test_a_long_list_of_ranks_ends_with_a_whole_number() -> None:
    ranks = list(range(1000, 1500))
    behind = [dump(rank, 1, members=[0, *ranks], retired=True) for rank in ranks]
    batch = next(iter(DumpedRun([dump(0, 2, members=[0, *ranks]), *behind], "r").batches()))
    listed = str(batch.events[0].detail["ranks"]).split(",")
    assert len(listed) > 100
    assert listed == [str(rank) for rank in ranks[: len(listed)]]


def test_two_dumps_of_one_rank_are_refused() -> None:
    with pytest.raises(TraceFileError, match="one dump of each rank, got rank 0, as in rank_0"):
        DumpedRun([dump(0, 9), dump(0, 9)], "r")


def test_a_dump_of_no_rank_of_the_run_is_refused() -> None:
    with pytest.raises(
        TraceFileError, match=r"rank_9: expected a dump of a rank of the run's process groups, got rank 9"
    ):
        DumpedRun([dump(0, 9, [0, 1]), dump(9, 8, [0, 1])], "r")


@pytest.mark.parametrize("last", [{"time_created_ns": 10**25}, {"collective_seq_id": 10**25}])
def test_numbers_of_more_than_64_bits_are_refused(last: dict[str, Any]) -> None:
    with pytest.raises(TraceFileError, match="rank_0: expected times and numbers of a training"):
        list(encoded(DumpedRun([dump(0, 9, **last)], "r")))


def test_dumps_without_a_rank_that_waits_make_no_run() -> None:
    with pytest.raises(TraceFileError, match="no rank that waits in a collective"):
        DumpedRun([dump(0, 9, retired=True)], "r")


def test_a_group_with_an_absent_rank_comes_before_one_that_all_have_entered() -> None:
    later = {"process_group": ("1", "second")}
    dumps = [
        RankDump(f"rank_{rank}", rank, [*dump(rank, 3).entries, *msgspec.convert(others, list[Entry])], {})
        for rank, others in enumerate(([entry(5, **later, retired=False)], [entry(4, **later)]))
    ]
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts(dumps)] == [("absent", [1]), ("entered", [])]


def test_the_run_of_dumps_has_what_each_rank_waits_in() -> None:
    frames = [{"name": "step", "filename": "/home/train.py", "line": 14}, {"name": "<module>", "filename": "main.py"}]
    run = DumpedRun([dump(0, 9, members=[0, 1, 2], frames=frames), dump(1, 8, retired=True)], "r")
    waits, absent = run.batches()
    assert (waits.world_size, waits.rank, absent.rank, absent.events) == (3, 0, 1, [])
    assert waits.pulse is not None
    assert (waits.pulse.waits_in, waits.pulse.collectives) == ("all_reduce", 9)
    assert waits.pulse.stack == ["main.py:0 <module>", "train.py:14 step"]
    assert absent.pulse is not None
    assert absent.pulse.activity == ""  # A dump does not tell what a rank does outside of a collective.
    (event,) = waits.events
    assert (event.detail["kind"], event.detail["ranks"], event.detail["waiting"]) == ("absent", "1", "0")
    assert run.lines == [event.detail["verdict"], f"cause: {event.detail['cause']}"]
    for batch in (waits, absent):
        wire.decode(wire.encode(batch))


class Attack:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("pickled",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps({"entries": [Attack()]}), "it holds posix.mkdir"),
        (pickle.dumps({"entries": [1]}), "Expected `object`"),
        (pickle.dumps({"entries": []})[:-3], "a dump of torch's Flight Recorder"),
        (b"{}", "missing required field `entries`"),
        (json.dumps({"entries": [{"collective_seq_id": "9"}]}).encode(), "Expected `int`"),
    ],
    ids=["code", "wrong type", "cut off", "no entries", "wrong number"],
)
def test_what_is_no_dump_is_told_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=reason):
        read(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_s_rank_is_the_last_number_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_7_rank_12.json"
    path.write_text('{"entries": []}')
    assert (is_dump(path), read(path).rank) == (True, 12)
    for name in ("dump", "dump_20261130120000"):
        path = path.rename(tmp_path / name)
        with pytest.raises(TraceFileError, match="a name that ends in the rank"):
            read(path)

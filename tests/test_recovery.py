"""Places of dead processes become batches, once, and of one run alone."""

from __future__ import annotations

from pathlib import Path
from threading import Timer
from unittest.mock import patch

import pytest
import zstandard

from ddpobs import wire
from ddpobs.export.spool import Spool
from ddpobs.recording.place.dead_places import note_exit
from ddpobs.recording.place.last_place import FOLDER, LastPlace
from ddpobs.recording.place.place_file import LAUNCH, PlaceIdentity, Slot
from ddpobs.recovery import recover

LIMIT = 10**9


def dead(folder: Path, run: str, source: str, launch: str = "") -> LastPlace:
    """Leave the place of a process that died after its eighth batch, in a bucket of step 13."""
    place = LastPlace(folder / FOLDER, source)
    with patch.dict("os.environ", {LAUNCH: launch}):
        place.identify(PlaceIdentity(run, "a" * 16, source, 3, 4, "host"))
    slots = place.slots
    place.batch_built(7, 90, 2)
    slots[Slot.STEP], slots[Slot.CLOSED], slots[Slot.CLOSED_AT_STEP] = 10, 5, 2
    slots[Slot.PHASE], slots[Slot.MODULE], slots[Slot.BUCKET] = wire.PHASES.index("backward"), 0, 4
    slots[Slot.STARTED] -= 1
    return place


def batches(folder: Path) -> list[wire.Batch]:
    bodies = [spooled.body() for spooled in Spool(folder, LIMIT).batches()]
    return [wire.decode(zstandard.decompress(body, max_output_size=2**20)) for body in bodies]


def test_a_dead_process_is_reported_under_its_own_identity_after_its_last_batch(tmp_path: Path) -> None:
    slots = dead(tmp_path, "r", "b" * 16).slots
    assert recover(tmp_path, LIMIT) == {"b" * 16}
    (batch,) = batches(tmp_path)
    assert (batch.run, batch.attempt, batch.source, batch.rank, batch.world_size) == ("r", "a" * 16, "b" * 16, 3, 4)
    assert (batch.seq, batch.emitted, batch.dropped) == (8, 91, 2)
    (event,) = batch.events
    assert (event.kind, event.step, event.at_ns) == ("died", 13, max(slots[Slot.AT_NS], slots[Slot.ALIVE_NS]))
    facts = {"phase": "backward", "module": 0, "bucket": 4, "step": 13, "synchronised": 0}
    assert {name: event.detail[name] for name in facts} == facts
    assert event.detail["wall_ns"] == batch.anchor.wall_ns


@pytest.mark.parametrize(
    ("status", "detail"),
    [(-9, {"signal": "SIGKILL"}), (-40, {"signal": "signal 40"}), (3, {"exit_status": 3}), (0, {"exit_status": 0})],
)
def test_the_parent_adds_signal_or_exit_status(tmp_path: Path, status: int, detail: dict[str, object]) -> None:
    place = dead(tmp_path, "r", "b" * 16)
    note_exit(tmp_path / FOLDER, place.slots[Slot.PID] + 1, 77)  # Another process's end.
    note_exit(tmp_path / FOLDER, place.slots[Slot.PID], status)
    recover(tmp_path, LIMIT)
    (event,) = batches(tmp_path)[0].events
    assert {name: event.detail.get(name) for name in detail} == detail
    assert ("signal" in event.detail) != ("exit_status" in event.detail)


def test_a_reporter_waits_for_the_parent_to_note_the_exit(tmp_path: Path) -> None:
    place = dead(tmp_path, "r", "b" * 16)
    parent = Timer(0.1, note_exit, (tmp_path / FOLDER, place.slots[Slot.PID], -11))
    parent.start()
    recover(tmp_path, LIMIT, parent_s=60)
    parent.join()
    assert batches(tmp_path)[0].events[0].detail["signal"] == "SIGSEGV"


def test_a_reporter_goes_on_without_the_parent(tmp_path: Path) -> None:
    dead(tmp_path, "r", "b" * 16)
    assert recover(tmp_path, LIMIT, parent_s=0.05) == {"b" * 16}


def test_a_place_is_reported_once(tmp_path: Path) -> None:
    dead(tmp_path, "r", "b" * 16)
    assert recover(tmp_path, LIMIT) == {"b" * 16}
    assert recover(tmp_path, LIMIT) == set()
    assert not list((tmp_path / FOLDER).iterdir())


def test_two_reporters_at_once_write_the_same_batch(tmp_path: Path) -> None:
    dead(tmp_path, "r", "b" * 16)
    (link,) = (tmp_path / FOLDER).iterdir()
    content = link.read_bytes()
    recover(tmp_path, LIMIT)
    link.write_bytes(content)  # The other reporter has read it before.
    recover(tmp_path, LIMIT)
    assert len(list(Spool(tmp_path, LIMIT).batches())) == 1


def test_the_place_of_another_run_stays(tmp_path: Path) -> None:
    dead(tmp_path, "theirs", "c" * 16)
    dead(tmp_path, "r", "b" * 16)
    assert recover(tmp_path, LIMIT, "r") == {"b" * 16}
    assert recover(tmp_path, LIMIT) == {"c" * 16}


def test_a_survivor_leaves_a_process_to_the_ddpobs_run_that_watches_it(tmp_path: Path) -> None:
    watched = dead(tmp_path, "r", "b" * 16, launch="first")
    watched.slots[Slot.WATCHED] = 1
    dead(tmp_path, "r", "c" * 16, launch="first")  # Started on another host, without a parent there.
    assert recover(tmp_path, LIMIT, "r", launch="first") == {"c" * 16}
    assert recover(tmp_path, LIMIT, "r", launch="second") == {"b" * 16}

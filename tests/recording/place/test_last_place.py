"""The place of a process that is killed, read by another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddpobs import wire
from ddpobs.recording.place import last_place
from ddpobs.recording.place.dead_places import places_of_the_dead
from ddpobs.recording.place.last_place import LastPlace
from ddpobs.recording.place.place_file import PlaceIdentity, Slot
from ddpobs.recording.probes import oom_kills

_KILLED = """
import os, sys, time
from pathlib import Path
from ddpobs.recording.place.last_place import LastPlace
from ddpobs.recording.place.place_file import PlaceIdentity, Slot
place = LastPlace(Path(sys.argv[1]), "0123456789abcdef")
place.identify(PlaceIdentity("run", "a" * 16, "0123456789abcdef", 3, 4, "host"))
place.slots[Slot.STEP], place.slots[Slot.CLOSED_AT_STEP], place.slots[Slot.CLOSED] = 10, 9, 12
place.slots[Slot.SYNCHRONISED] = 12
place.slots[Slot.PHASE], place.slots[Slot.BUCKET], place.slots[Slot.MODULE] = 2, 1, 0
place.slots[Slot.AT_NS] = time.monotonic_ns()
if sys.argv[2] == "in order":
    place.close()
print("ready", flush=True)
time.sleep(60)
"""


def process(folder: Path, how: str) -> subprocess.Popen[str]:
    started = subprocess.Popen([sys.executable, "-c", _KILLED, str(folder), how], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def test_a_killed_process_leaves_its_place(tmp_path: Path) -> None:
    killed = process(tmp_path, "killed")
    assert list(places_of_the_dead(tmp_path)) == []  # It still runs.
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (place,) = places_of_the_dead(tmp_path)
    identity = replace(place.identity, process_space="", memory_events="")
    assert identity == PlaceIdentity("run", "a" * 16, "0123456789abcdef", 3, 4, "host")
    assert (place.phase, place.step, place.synchronised, place.module, place.bucket) == ("backward", 13, 12, 0, 1)
    assert (place.pid, place.path.stat().st_mode & 0o777) == (killed.pid, 0o600)
    in_memory = place.path.readlink()
    assert in_memory.exists()
    place.remove()
    assert list(tmp_path.iterdir()) == []
    assert not in_memory.exists()


def test_a_process_that_ends_in_order_leaves_none(tmp_path: Path) -> None:
    ended = process(tmp_path, "in order")
    ended.kill()
    ended.wait()
    assert list(places_of_the_dead(tmp_path)) == []


def test_the_number_of_a_dead_process_may_be_another_s_now(tmp_path: Path) -> None:
    place = LastPlace(tmp_path, "0123456789abcdef")
    place.identify(PlaceIdentity("run", "a" * 16, "0123456789abcdef", 0, 1, "host"))
    assert list(places_of_the_dead(tmp_path)) == []
    place.slots[Slot.STARTED] -= 1
    assert [dead.pid for dead in places_of_the_dead(tmp_path)] == [os.getpid()]
    place.close()


def test_a_process_of_another_host_counts_as_dead_after_an_hour_of_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_place, "process_space", lambda: "another host")
    place = LastPlace(tmp_path, "0123456789abcdef")
    place.identify(PlaceIdentity("run", "a" * 16, "0123456789abcdef", 0, 1, "host"))
    place.slots[Slot.STARTED] -= 1
    assert list(places_of_the_dead(tmp_path)) == []
    place.slots[Slot.WALL_NS] -= 2 * 3600 * 10**9
    assert [dead.identity.rank for dead in places_of_the_dead(tmp_path)] == [0]
    place.close()


@pytest.mark.parametrize(("before", "after", "kills"), [(2, 5, 3), (2, 2, 0), (5, 2, None)])
def test_out_of_memory_kills_count_from_the_start_of_the_process(
    before: int, after: int, kills: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "memory.events"
    events.write_text(f"low 0\noom_kill {before}\n")
    monkeypatch.setattr(oom_kills, "path", lambda: events)
    place = LastPlace(tmp_path, "0123456789abcdef")
    place.identify(PlaceIdentity("run", "a" * 16, "0123456789abcdef", 0, 1, "host"))
    place.slots[Slot.STARTED] -= 1
    events.write_text(f"low 0\noom_kill {after}\n")
    assert [dead.oom_kills for dead in places_of_the_dead(tmp_path)] == [kills]
    place.close()


def test_a_file_that_is_cut_or_foreign_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "0.place").write_bytes(b"")
    (tmp_path / "1.place").write_bytes(os.urandom(4096))
    assert list(places_of_the_dead(tmp_path)) == []


def test_without_a_folder_the_place_is_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = LastPlace(tmp_path / "file", "0123456789abcdef")
    place.slots[Slot.PHASE] = 1
    place.identify(PlaceIdentity("run", "a" * 16, "0123456789abcdef", 0, 1, "host"))
    place.close()
    assert place.slots[Slot.BUCKET] == wire.UNKNOWN

"""`ddpobs run` and ranks that are killed under it, as small processes that leave a place, with a fake collector."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import zstandard

from benchmarks.rig import patience
from ddpobs import wire
from tests.support.integration.collectors import Seen, absent, acknowledge, collector
from tests.support.integration.run_command import command

RANKS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.tied import end_with_parent
from ddpobs.recording.place.last_place import FOLDER, LastPlace
from ddpobs.recording.place.place_file import PlaceIdentity, Slot

def train(rank):
    source = f"{rank}".zfill(16)
    place = LastPlace(Path(os.environ["DDPOBS_SPOOL"]) / FOLDER, source)
    place.slots[Slot.STEP], place.slots[Slot.SYNCHRONISED] = 40 + rank, 9 - rank
    place.slots[Slot.PHASE], place.slots[Slot.MODULE], place.slots[Slot.BUCKET] = 2, 0, 3
    place.identify(PlaceIdentity(os.environ["DDPOBS_RUN"], "a" * 16, source, rank, 2, "host"))
    time.sleep(1.5)
    return place

ranks = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        end_with_parent()
        train(rank)
        time.sleep(600)
    ranks.append(pid)
time.sleep(2.5)
"""
KILL_BOTH = "os.kill(ranks[1], 9); os.waitpid(ranks[1], 0); os.kill(ranks[0], 9); os.waitpid(ranks[0], 0)\n"
KILL_ONE_AND_STAY = "os.kill(ranks[1], 9); os.waitpid(ranks[1], 0); print(flush=True); time.sleep(600)\n"
INTERRUPTED = "signal.signal(2, lambda *_: None); print(flush=True); time.sleep(1)\n" + KILL_BOTH
END_IN_ORDER = """
for pid in ranks:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
for path in Path(os.environ["DDPOBS_SPOOL"], FOLDER).iterdir():
    path.unlink()
"""


def started(code: str, url: str, spool: Path) -> subprocess.Popen[str]:
    """Start ranks under `ddpobs run`, and then the code in their parent."""
    arguments = command("-c", RANKS + code, url=url)
    arguments["env"]["DDPOBS_SPOOL"] = str(spool)
    return subprocess.Popen(**arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def deaths(seen: Seen) -> list[tuple[str, int, str, int, int]]:
    """Kind, rank, phase, step and bucket of each reported end, in the order of sending."""
    batches = [wire.decode(zstandard.decompress(body, max_output_size=2**20)) for _, body, _ in seen.puts]
    return [
        (event.kind, batch.rank, str(event.detail["phase"]), event.step, int(event.detail["bucket"] or 0))
        for batch in batches
        for event in batch.events
    ]


def test_killed_ranks_are_reported_in_the_order_of_their_ends_and_once(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        with started(KILL_BOTH, seen.url, tmp_path) as process:
            errors = process.communicate(timeout=patience.HANG_S)[1]
        assert process.returncode == 0
        assert deaths(seen) == [("died", 1, "backward", 41, 3), ("died", 0, "backward", 40, 3)]
        assert errors.splitlines() == [
            f"ddpobs: rank 1 ended without an error in backward of step 41, bucket 0.3; then 1 more: {seen.url}/runs/r"
        ]
        with started(END_IN_ORDER, seen.url, tmp_path) as process:
            assert process.communicate(timeout=patience.HANG_S) == ("", "")
        assert len(seen.puts) == 2


def test_a_killed_rank_is_reported_while_the_command_goes_on(tmp_path: Path) -> None:
    with collector(acknowledge) as seen, started(KILL_ONE_AND_STAY, seen.url, tmp_path) as process:
        patience.until(lambda: deaths(seen) == [("died", 1, "backward", 41, 3)])
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)


def test_ranks_of_an_interrupted_launcher_are_interrupted(tmp_path: Path) -> None:
    with collector(acknowledge) as seen, started(INTERRUPTED, seen.url, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=patience.HANG_S)[1] == ""
        assert [kind for kind, *_ in deaths(seen)] == ["interrupted", "interrupted"]
    assert [path.name for path in tmp_path.rglob("*")] == ["places"]


def test_a_report_that_does_not_arrive_is_left_to_the_next_attempt_and_not_to_another_launch(tmp_path: Path) -> None:
    with started(KILL_BOTH, absent(), tmp_path) as process:
        errors = process.communicate(timeout=patience.HANG_S)[1]
    assert "the collector accepts no report, which the next attempt sends" in errors
    with collector(acknowledge) as seen:
        arguments = command("-c", "import time; time.sleep(2.5)", url=seen.url)
        arguments["env"]["DDPOBS_SPOOL"] = str(tmp_path)
        subprocess.run(**arguments, check=True)
        assert not seen.puts
    assert len(list((tmp_path / "places").glob("*.place"))) == 2

"""A look at a thread that waits by real means."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ddpobs.never_raises import never_raises
from ddpobs.recording.looks import activity
from ddpobs.recording.looks.activity import Activity, ActivityWatch


@contextmanager
def thread_in(work: Callable[[], object]) -> Iterator[int]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert thread.ident is not None
    yield thread.ident


def look(watch: ActivityWatch, thread: int, **facts: Any) -> Activity:
    defaults: dict[str, Any] = {
        "entries": 0,
        "step": 3,
        "phase": "other",
        "bucket_pending": False,
        "waits_in": "",
        "evaluating": False,
    }
    return watch.look(thread, **(defaults | facts))


def test_a_thread_that_waits_for_a_lock_is_idle_in_its_own_code() -> None:
    lock = threading.Lock()
    lock.acquire()
    with thread_in(lambda: (lock.acquire(), None)) as thread:
        watch = ActivityWatch(0.1)
        look(watch, thread)
        time.sleep(0.2)
        seen = look(watch, thread)
        assert (seen.kind, seen.place.split()[0].split(":")[0]) == ("code", "test_activity.py")
        assert seen.idle_ns > 0.15e9
        assert "test_activity.py" in seen.stack[-1]
        lock.release()


def test_code_that_dynamo_must_not_compile_does_not_count_as_compiling() -> None:
    lock = threading.Lock()
    lock.acquire()
    with thread_in(torch._dynamo.disable(lambda: (lock.acquire(), None))) as thread:
        seen = look(ActivityWatch(0.1), thread)
        assert any("eval_frame.py" in line for line in seen.stack)
        assert seen.kind == "code"
        lock.release()


def test_another_thread_in_the_users_code_shows_its_frames_and_a_pool_s_thread_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activity, "_THREADS", 1_000)  # Threads of earlier tests still sleep in this process.
    lock, ends = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            ends.wait()

    holder = threading.Thread(target=hold, name="holder", daemon=True)
    pooled = threading.Thread(target=ends.wait, name="pooled", daemon=True)
    holder.start()
    pooled.start()
    with thread_in(lambda: (lock.acquire(), None)) as thread:
        stacks = activity.other_stacks(thread)
        assert "pooled" not in stacks
        assert stacks["holder"][0].endswith(" hold")
        assert "holder" not in activity.other_stacks(holder.ident or 0)
        ends.set()
    holder.join()
    pooled.join()


def test_the_frames_of_telemetry_are_not_shown() -> None:
    lock = threading.Lock()
    lock.acquire()
    with thread_in(lambda: (never_raises(lock.acquire)(), None)) as thread:
        seen = look(ActivityWatch(0.1), thread)
        assert seen.kind == "code"
        assert "test_activity.py" in seen.stack[-1]
        lock.release()


def test_a_module_that_has_moved_is_an_error_and_not_a_wait_that_nobody_recognises() -> None:
    assert Path(activity._path_of("ddpobs.torch_seam.collectives")).is_file()
    assert Path(activity._path_of("ddpobs.reducer")).is_dir()
    with pytest.raises(ImportError, match=r"ddpobs\.reduction has moved"):
        activity._path_of("ddpobs.reduction")


def test_new_entries_and_new_lines_are_progress() -> None:
    def count() -> None:
        while True:
            time.sleep(0.007)
            time.sleep(0.011)
            time.sleep(0.013)

    with thread_in(count) as thread:
        watch = ActivityWatch(0.1)
        lines = set()
        for _ in range(50):
            seen = look(watch, thread)
            lines.add(seen.place)
            time.sleep(0.01)
        assert len(lines) > 1
        assert seen.idle_ns < 0.5e9
    with thread_in(lambda: time.sleep(60)) as thread:
        watch = ActivityWatch(0.1)
        look(watch, thread, entries=1)
        time.sleep(0.1)
        assert look(watch, thread, entries=2).idle_ns == 0


class Stuck(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(60)
        return torch.zeros(1)


def test_a_data_set_that_blocks_is_named_with_its_line() -> None:
    with thread_in(lambda: next(iter(DataLoader(Stuck())))) as thread:
        seen = look(ActivityWatch(0.1), thread)
        assert seen.kind == "data"
        assert seen.place.endswith("__getitem__")
        assert "→" in seen.place


def test_a_loop_that_polls_a_queue_of_workers_is_idle() -> None:
    empty: queue.Queue[int] = queue.Queue()

    class Polling(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                with suppress(queue.Empty):
                    yield empty.get(timeout=0.01)

    with thread_in(lambda: next(iter(DataLoader(Polling())))) as thread:
        watch = ActivityWatch(0.1)
        look(watch, thread)
        for _ in range(30):
            time.sleep(0.01)
            seen = look(watch, thread)
        assert seen.kind == "data"


@pytest.mark.parametrize(("phase", "kind"), [("data", "data"), ("forward", "code")])
def test_the_phase_shows_a_loader_that_is_not_torch_s(phase: str, kind: str) -> None:
    with thread_in(lambda: time.sleep(60)) as thread:
        assert look(ActivityWatch(0.1), thread, phase=phase).kind == kind


def test_an_open_wait_is_a_collective() -> None:
    with thread_in(lambda: time.sleep(60)) as thread:
        seen = look(ActivityWatch(0.1), thread, waits_in="all_reduce")
        assert (seen.kind, seen.waits_in) == ("collective", "all_reduce")


def test_patience_grows_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    watch = ActivityWatch(8)
    assert look(watch, 0, step=0).patience_ns == 120 * 10**9
    for step in range(1, 6):
        clock[0] += 30 * 10**9
        seen = look(watch, 0, step=step, entries=step)
    assert seen.patience_ns == 150 * 10**9

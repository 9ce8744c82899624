"""Pulses of a thread that waits by real means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from benchmarks.rig import patience
from ddpobs import wire
from ddpobs.clocks import HostClock
from ddpobs.recording.hooks.collective_hooks import CollectiveHooks
from ddpobs.recording.journal import Journal
from ddpobs.recording.looks.activity import ActivityWatch
from ddpobs.recording.looks.pulses import Pulses
from ddpobs.recording.module_recorder import ModuleRecorder

Events = list[tuple[str, int, dict[str, wire.Scalar]]]


class Training:
    """Journal, recorder and pulses, with a thread that trains."""

    def __init__(self, hang_after_s: float = 0.02) -> None:
        self.events: Events = []
        self.journal = Journal(HostClock(), lambda _: None)
        model = torch.nn.Linear(1, 1)
        self.recorder = ModuleRecorder(
            0, model, self.journal, clock=HostClock(), offer=lambda _: None, readiness_every=64
        )
        self.model = model
        watch = ActivityWatch(hang_after_s)
        self.pulses = Pulses(self.journal, [self.recorder], watch, lambda *event: self.events.append(event))

    @contextmanager
    def on(self, work: Callable[[], object]) -> Iterator[None]:
        """Train on a thread that runs `work`."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.journal.thread.ident = thread.ident or 0
        time.sleep(0.2)
        yield

    def look(self) -> wire.Pulse:
        return self.pulses.look({})


def test_a_stuck_rank_sends_its_stack_urgently_when_it_changes_and_its_length_at_the_end() -> None:
    training = Training()
    first, second, third, passed = threading.Event(), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        first.wait()
        passed.set()
        second.wait()
        third.wait()

    with training.on(work):
        assert training.look().stack == []
        time.sleep(0.5)
        stuck = training.look()
        assert training.pulses.is_urgent
        assert "work" in stuck.stack[-3]
        assert stuck.idle_ns >= 0.3e9
        assert training.look().stack == stuck.stack  # The collector keeps the latest pulse alone.
        assert not training.pulses.is_urgent
        assert training.pulses.is_stuck
        first.set()
        assert passed.wait(patience.HANG_S)
        time.sleep(0.1)
        assert not training.look().stack
        (went_on,) = training.events
        assert went_on[0] == "stuck"
        assert 0.3e9 < int(went_on[2]["idle_ns"] or 0) < 60e9
        assert (went_on[2]["activity"], went_on[2]["synchronised"]) == ("code", 0)
        assert "work" in str(went_on[2]["place"])
        time.sleep(0.5)
        assert training.look().place != stuck.place
        assert training.pulses.is_urgent
        training.pulses.end()
        training.pulses.end()
        assert [detail["outcome"] for _, _, detail in training.events] == ["went on", "ended"]
    second.set()
    third.set()


def test_a_captured_graph_is_never_stuck() -> None:
    training = Training()
    with training.on(lambda: time.sleep(60)):
        training.look()
        training.journal.thread.paused = True
        time.sleep(0.5)
        assert training.look().idle_ns == 0
        assert not training.pulses.is_stuck


def test_the_pulse_names_the_first_bucket_that_was_launched_and_is_not_done() -> None:
    training = Training()
    with training.on(lambda: time.sleep(60)):
        assert training.look().bucket == wire.UNKNOWN
        training.recorder.layout([wire.Bucket(size_bytes=4, dtype="f", parameters=[])] * 3, "all_reduce")
        record = training.recorder.backward()
        assert record is not None
        record.launched_ns[:] = [1, 1, 1]
        record.done_ns[:] = [1, 0, 0]
        pulse = training.look()
        assert (pulse.module, pulse.bucket, pulse.synchronised) == (0, 1, 1)
        record.done_ns[:] = [1, 1, 1]
        assert training.look().bucket == 2
        training.recorder.shadowed()
        assert training.look().synchronised == 2
        assert training.recorder.buffers_began() > 0
        assert training.look().buffer_broadcasts == 1


def test_a_wait_at_the_store_is_named() -> None:
    training = Training()
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hooks = CollectiveHooks(training.journal)
    hooks.install()
    starts = threading.Event()

    def work() -> None:
        starts.wait()
        store.get("absent")

    try:
        with training.on(work):
            starts.set()
            patience.until(lambda: training.journal.waits._at_store)
            pulse = training.look()
            assert (pulse.activity, pulse.waits_in) == ("collective", "store.get")
            other: Any = PrefixStore("p", store.clone())  # This thread does not train.
            other.set("key", "value")
            assert other.get("key") == b"value"
            assert training.look().waits_in == "store.get"
            other = store.clone()
            other.set("absent", "1")
            patience.until(lambda: training.journal.waits._at_store == "")
    finally:
        hooks.remove()
    assert not hasattr(Store.get, "__wrapped__")


@pytest.mark.parametrize("name", ["all_reduce", "barrier"])
def test_a_collective_of_the_user_is_counted_and_named(name: str) -> None:
    training = Training()
    store: Any = HashStore()
    hooks = CollectiveHooks(training.journal)
    hooks.install()
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        training.journal.waits.collectives = 0
        if name == "barrier":
            dist.barrier()
        else:
            dist.all_reduce(torch.zeros(1))
        assert (training.journal.waits.collectives, training.journal.waits.last_collective) == (1, name)
    finally:
        hooks.remove()
        dist.destroy_process_group()


def test_idle_prompts_and_computing_threads_are_not_stuck() -> None:
    watch = ActivityWatch(0.02)
    facts: dict[str, Any] = {"entries": 0, "step": 0, "phase": "other", "bucket_pending": False, "evaluating": False}
    thread = threading.main_thread().ident or 0
    watch.look(thread, waits_in="", **facts)
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        sum(range(1000))
    assert watch.look(thread, waits_in="", **facts).idle_ns == 0
    time.sleep(0.4)
    assert watch.look(0, waits_in="", **facts).idle_ns == 0  # No frame: nothing of the user's runs.

"""Counters of a thread that is held up by real means: a busy neighbour, a quota, a disk, a collection."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpobs import wire
from ddpobs.recording.probes.counter_reader import CounterReader
from ddpobs.recording.probes.cpu_quota import CpuQuota
from ddpobs.steps.counters import COUNTERS, throttled_ns, totals
from tests.support.control_groups import quota_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")


def read(reader: CounterReader) -> dict[str, int]:
    reader._until_usage = 0
    return dict(zip(("series", *COUNTERS), totals(reader.read()), strict=True))


def increase(work: Callable[[], object], reader: CounterReader | None = None) -> dict[str, int]:
    reader = reader or CounterReader()
    reader.install()
    try:
        began = read(reader)
        work()
        ended = read(reader)
    finally:
        reader.close()
    assert began["series"] == ended["series"]
    return {name: ended[name] - began[name] for name in COUNTERS}


def compute(seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
    end = clock() + seconds
    while clock() < end:
        pass


def test_a_busy_neighbour_on_the_same_processor_shows_as_run_delay_and_preemptions() -> None:
    processors = os.sched_getaffinity(0)
    processor = min(processors)
    neighbour = subprocess.Popen(
        [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{processor}])\nwhile True: pass"]
    )
    try:
        os.sched_setaffinity(0, [processor])
        time.sleep(0.2)
        counted = increase(lambda: compute(0.4))
    finally:
        os.sched_setaffinity(0, processors)
        neighbour.kill()
        neighbour.wait()
    assert counted["run_delay_ns"] > 50_000_000
    assert counted["preemptions"] > 0
    assert 300_000_000 <= counted["running_ns"] + counted["run_delay_ns"] < 2_000_000_000


def test_a_thread_that_sleeps_neither_runs_nor_waits_for_a_processor() -> None:
    counted = increase(lambda: time.sleep(0.3))
    assert counted["running_ns"] < 20_000_000
    assert counted["major_faults"] == 0


def test_memory_that_has_to_be_read_from_the_disk_shows_as_major_faults(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    file.write_bytes(os.urandom(1 << 22))

    def fault() -> None:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                pages.madvise(mmap.MADV_RANDOM)
                for offset in range(0, len(pages), mmap.PAGESIZE):
                    pages[offset]

    assert increase(fault)["major_faults"] > 0


def test_a_collection_counts_with_its_length() -> None:
    heap: Any = [[] for _ in range(300_000)]
    counted = increase(gc.collect)
    assert counted["collections"] >= 1
    assert counted["collecting_ns"] > 1_000_000
    del heap


def test_no_collection_counts_after_the_end() -> None:
    reader = CounterReader()
    reader.install()
    reader.install()
    assert gc.callbacks.count(reader._collection) == 1
    reader.close()
    assert reader._collection not in gc.callbacks


def test_a_real_quota_shows_as_throttled_time() -> None:
    # The quota is smaller than what a busy machine leaves to one of its processes.
    with quota_group(50) as group:
        script = (
            "from tests.recording.probes.test_counter_reader import *\n"
            "from tests.support.control_groups import QuotaGroup\n"
            f"QuotaGroup(Path({str(group.folder)!r})).join()\n"
            "reader = CounterReader()\n"
            "print(reader.quota.permille, increase(lambda: compute(0.05, time.thread_time), reader)['throttled_ns'])\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        permille, held_up_ns = map(int, done.stdout.split())
    assert permille == 50
    assert held_up_ns > 50_000_000


def test_without_a_quota_no_time_is_throttled_and_no_statistics_are_read(tmp_path: Path) -> None:
    process = second_version(tmp_path, {"": "max 100000", "job": "max 100000"}, "/job")
    quota = CpuQuota(process)
    assert (quota.permille, quota.statistics(), quota.throttled_ns()) == (wire.UNKNOWN, None, 0)


def second_version(folder: Path, limits: dict[str, str], path: str, root: str = "/") -> Path:
    """Make the files of a process and of its control groups; return the process's folder."""
    mount = folder / "mount"
    for group, limit in limits.items():
        (mount / group).mkdir(parents=True, exist_ok=True)
        (mount / group / "cpu.max").write_text(f"{limit}\n")
        (mount / group / "cpu.stat").write_text("usage_usec 1\nnr_throttled 2\nthrottled_usec 1234\n")
    process = folder / "process"
    process.mkdir()
    (process / "cgroup").write_text(f"0::{path}\n")
    (process / "mountinfo").write_text(f"30 23 0:26 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw\n")
    return process


def test_the_tightest_quota_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    limits = {"": "max 100000", "pod": "150000 100000", "pod/job": "400000 100000", "other": "1000 100000"}
    quota = CpuQuota(second_version(tmp_path, limits, "/pod/job"))
    assert (quota.permille, quota.throttled_ns()) == (1500, 1_234_000)


def test_in_a_container_the_mount_is_the_group_of_the_process(tmp_path: Path) -> None:
    quota = CpuQuota(second_version(tmp_path, {"": "50000 100000"}, "/docker/abc", root="/docker/abc"))
    assert quota.permille == 500


def test_a_quota_that_is_set_later_is_found_at_the_next_look(tmp_path: Path) -> None:
    quota = CpuQuota(second_version(tmp_path, {"": "max 100000"}, "/"))
    (tmp_path / "mount" / "cpu.max").write_text("20000 100000")
    quota.look()
    assert (quota.permille, throttled_ns(quota.statistics() or b"")) == (200, 1_234_000)


def test_every_eighth_look_of_the_reader_finds_such_a_quota(tmp_path: Path) -> None:
    reader = CounterReader(CpuQuota(second_version(tmp_path, {"": "max 100000"}, "/")))
    (tmp_path / "mount" / "cpu.max").write_text("20000 100000")
    found = []
    for _ in range(8):
        reader.look()
        found.append(reader.quota.permille)
    assert found == [wire.UNKNOWN] * 7 + [200]


def test_without_control_groups_throttling_is_not_known(tmp_path: Path) -> None:
    quota = CpuQuota(tmp_path)
    assert (quota.permille, quota.throttled_ns(), quota.statistics()) == (wire.UNKNOWN, wire.UNKNOWN, b"")


@pytest.mark.parametrize("schedule", [b"", b"0 0 0\n", b"rubbish", b"-1 -1 -1"])
def test_a_kernel_without_statistics_leaves_the_schedule_unknown(schedule: bytes) -> None:
    assert totals((1, schedule, 2, 3, None, 4, 5)) == (1, wire.UNKNOWN, wire.UNKNOWN, 2, 3, 0, 4, 5)


def test_another_thread_begins_another_series() -> None:
    reader = CounterReader()
    series = [read(reader)["series"]]
    thread = threading.Thread(target=lambda: series.append(read(reader)["series"]))
    thread.start()
    thread.join()
    assert series[0] != series[1]


def test_closed_descriptors_lose_readings_and_nothing_else() -> None:
    reader = CounterReader()
    assert reader.read()
    os.close(reader._schedule)
    assert reader.read() == ()
    with (Path("/proc/self/maps")).open() as other:  # Takes the number that is free now.
        reader.close()
        assert other.readline()


def test_page_faults_are_counted_in_each_reading_only_while_the_process_has_some() -> None:
    reader = CounterReader()
    reader.read()
    for _ in range(8):
        reader._process_faults = 2**40  # The process has had no fault since the look before.
        reader.look()
    with_usage = [totals(reader.read())[4] != wire.UNKNOWN for _ in range(17)]
    assert 2 <= sum(with_usage) <= 3
    reader._process_faults = -1
    reader.look()
    for _ in range(8):
        reader.read()
    assert totals(reader.read())[4] != wire.UNKNOWN
    reader.close()

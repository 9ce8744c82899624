"""Each finding beside a run that only looks like it, and differs in one fact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.account.run_account import Launch, account_of
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.findings.registry import FINDINGS, MODULES

from ddpobs import wire
from ddpobs.wire.facts import DUMPED
from tests.support.analysis.accounts import S, phases, process
from tests.support.analysis.failures import evidence as failed_run
from tests.support.analysis.judged import findings_in
from tests.support.analysis.link_scenario import Run, on_hosts
from tests.support.analysis.pipeline_scenario import evidence_of as pipeline
from tests.support.analysis.scenario import MS, columns, evidence_of, flat, noiseless, own_times, with_columns
from tests.support.analysis.unit_scenario import Sharded

MB = 10**6
TWO_HOSTS = on_hosts(2, hosts=2)
ONE_HOST = on_hosts(2, hosts=1)
BYTES = Run(sizes=[4 * MB, MB], ready_ms=[5.0, 10.0])
"""40 ms of bytes a step."""
LATENCY = Run(sizes=[MB // 10, MB // 20] * 10, ready_ms=[0.1 * number for number in range(20)], alpha_ms=5.0)


class Pair(NamedTuple):
    """A run with a problem, and its innocent look-alike."""

    guilty: Callable[[], Evidence]
    innocent: Callable[[], Evidence]


def steps(own: wire.Ints, **facts: Any) -> Evidence:
    return evidence_of(*columns(own), **facts)


def slow(*phases_of: tuple[int, str, float], count: int = 200, ranks: int = 2) -> wire.Ints:
    """Own times with noise, and extra ms of ranks in phases."""
    own = own_times(count, ranks, seed=0)
    for rank, phase, ms in phases_of:
        own[:, rank, wire.OWN_PHASES.index(phase)] += round(ms * MS)
    return own


def waits(*ranks: int) -> Evidence:
    """Two hundred steps in which these of four ranks on two hosts wait 60 ms for a processor."""
    delays = np.zeros((200, 4))
    delays[:, list(ranks)] = 60 * MS
    run = steps(slow(*((rank, "other", 60) for rank in ranks), ranks=4))
    known = with_columns(run.steps, run_delay_ns=flat(delays), running_ns=flat(np.full((200, 4), 60 * MS)))
    return replace(run, steps=known, hosts={0: "a", 1: "a", 2: "b", 3: "b"})


def by_samples(varies: bool) -> Evidence:
    """Rank 1 takes long where its batches are large, or in the same steps without larger batches."""
    more = np.random.default_rng(0).random(200) * 2
    own = slow(count=200)
    own[:, 1, wire.OWN_PHASES.index("forward")] += (40 * more * MS).astype(np.int64)
    elements = np.full((200, 2), 1000.0)
    if varies:
        elements[:, 1] *= 1 + more
    run = steps(own)
    return replace(run, steps=with_columns(run.steps, elements=flat(elements)))


def grows(shape: Callable[[Any], Any]) -> Evidence:
    own = slow(count=400)
    own[:, :, wire.OWN_PHASES.index("other")] += (MS * shape(np.linspace(0, 1, 400))).astype(np.int64)[:, None]
    return steps(own)


def swings(times: int) -> Evidence:
    gap = np.full(400, 20.0)
    for first in np.linspace(20, 300, times).astype(int):
        gap[first : first + (40 if times > 1 else 400)] = 45.0
    return Run([1000], [5.0], steps=400, gap_ms=gap).evidence()


def slow_link(own_ms: float) -> Evidence:
    """A link that slows down in the second half, perhaps together with the ranks' computation."""
    slower, late = np.ones(200), np.zeros((200, 2))
    slower[100:], late[100:] = 3.0, own_ms
    return Run([MB, 2 * MB], [10.0, 20.0], steps=200, slower=slower, late_ms=late).evidence(**TWO_HOSTS)


def accumulated(micro_steps: int) -> Evidence:
    run = BYTES.evidence(**TWO_HOSTS)
    return replace(run, steps=with_columns(run.steps, micro_steps=np.full_like(run.steps.micro_steps, micro_steps)))


def compressed(comm: str) -> Evidence:
    run = BYTES.evidence(**TWO_HOSTS)
    columns_: Any = run.columns
    columns_._layout = msgspec.structs.replace(columns_._layout, comm=comm)
    return run


def pulse(activity: str, idle_s: int = 12, **fields: Any) -> wire.Pulse:
    known = {"phase": "backward", "step": 7, "patience_ns": 8 * S, "synchronised": 7}
    return wire.Pulse(at_ns=0, activity=activity, idle_ns=idle_s * S, **(known | fields))  # type: ignore[arg-type]


def stuck(other: wire.Pulse) -> Evidence:
    return failed_run(pulses={0: pulse("bucket", module=0, bucket=0), 1: other})


def silent(**known: Any) -> Evidence:
    return failed_run(is_lost=True, last_batch_ns={0: 0, 1: 0}, **known)


def ended(kind: str, **detail: wire.Scalar) -> Evidence:
    event = wire.Event(kind=kind, at_ns=0, step=6, detail={"wall_ns": 5 * S, "phase": "forward", **detail})
    return failed_run(events=[(0, event)])


def fingerprints(*parameters: int) -> Evidence:
    """Samples of one parameter and one gradient of as many ranks."""
    samples = [
        wire.Fingerprint(
            module=0,
            synchronised=8,
            names=["w"],
            buffer_names=[],
            gradients=np.array([1]),
            parameters=np.array([value]),
            buffers=np.array([], np.int64),
        )
        for value in parameters
    ]
    return failed_run(fingerprints=list(enumerate(samples)))


def reported(kind: str) -> Evidence:
    detail: dict[str, wire.Scalar] = {"reason": "unsynchronised", "parameters": "w", "count": 1, "epoch": 0}
    return steps(slow(), events=[(0, wire.Event(kind=kind, at_ns=0, step=3, detail=detail))])


def rested(low: float) -> Evidence:
    """Telemetry adds 2 % to a step."""
    cost = wire.TelemetryCost(ratio=1.02, low=low, high=2.04 - low, pairs=12)
    return failed_run(processes=[process(0, telemetry=cost)])


def time_outside(second_start_s: int, *, completed: bool) -> Evidence:
    """Two attempts; the later one starts long after the earlier one, which failed or is another training."""
    known: dict[str, Any] = {"steps": 50, "phases_ns": phases(backward=90), "checkpoint_step": 50}
    late = dict.fromkeys(("started_ns", "imported_ns", "ready_ns"), second_start_s * S)
    launches = [
        Launch("a", 0, 1, [process(0, **known)], completed=False),
        Launch("b", 1, 1, [process(0, until_s=second_start_s + 95, **known | late)]),
    ]
    return failed_run(account=account_of(launches[completed:]), world_size=1)


def unused(*sets: list[str]) -> Evidence:
    records = [(rank, wire.Unused(step=step, module=0, locally=s, globally=s)) for step, s in enumerate(sets)
               for rank in range(2)]  # fmt: skip
    return steps(noiseless({}, 40, 2), unused=records)


def flagged(**facts: Any) -> Evidence:
    return steps(noiseless({}, 40, 2), settings={"find_unused_parameters": True}, **facts)


def looked_at(phase: str, calls: str) -> Evidence:
    """Both ranks spend 80 ms of a step in one line."""
    code = [wire.CodePlace(phase=phase, place="a.py:3", calls=calls, looks=40)]  # type: ignore[arg-type]
    run = steps(slow((0, "other", 80), (1, "other", 80)))
    return replace(run, pulses={0: pulse("code", looks=40, code=code)})


def data_on(*ranks: int) -> Evidence:
    return steps(slow(*((rank, "data", 120) for rank in ranks), ranks=4))


def compiling(times: int) -> Evidence:
    """Rank 1 compiles for 200 ms in this many steps of 200, from step 20 on."""
    delays = np.zeros((200, 2))
    delays[20 : 20 + 10 * times : 10, 1] = 200 * MS
    own = slow()
    own[:, :, wire.OWN_PHASES.index("forward")] += delays.astype(np.int64)
    rank, known = columns(own)
    return evidence_of(rank, with_columns(known, compile_ns=flat(delays)))


PAIRS: dict[str, Pair] = {
    "accumulation-pays": Pair(lambda: accumulated(1), lambda: accumulated(4)),
    "bucket-order": Pair(
        lambda: Run([MB] * 4, [40.0, 30.0, 20.0, 10.0]).evidence(**TWO_HOSTS),
        lambda: Run([MB] * 4, [10.0, 20.0, 40.0, 39.9]).evidence(**TWO_HOSTS),
    ),
    "bucket-size": Pair(
        lambda: LATENCY.evidence(**TWO_HOSTS, settings={"bucket_cap_mb": 0.05}),
        lambda: replace(LATENCY, slower=np.where(np.arange(60) % 8 == 0, 1.0, 5.0)).evidence(**TWO_HOSTS),
    ),
    "clock-skew": Pair(lambda: failed_run(ahead_ns={1: 90 * S}), lambda: failed_run(ahead_ns={1: -90 * S})),
    "comm-bound": Pair(lambda: BYTES.evidence(**TWO_HOSTS), lambda: steps(slow((1, "forward", 150)))),
    "compression-pays": Pair(lambda: compressed("all_reduce"), lambda: compressed("bf16")),
    "crash": Pair(lambda: ended("failed", error="ValueError"), lambda: ended("terminated", signal="SIGTERM")),
    "epoch-not-set": Pair(lambda: reported("sampler_without_set_epoch"), lambda: reported("buckets_rebuilt")),
    "find-unused-needless": Pair(flagged, lambda: flagged(has_gaps=True)),
    "growing-steps": Pair(lambda: grows(lambda x: 60 * x), lambda: grows(lambda x: 60.0 * (x > 0.5))),
    "hang": Pair(lambda: stuck(pulse("data", phase="data")), lambda: stuck(pulse("checkpoint", 300))),
    "imbalanced-batches": Pair(lambda: by_samples(varies=True), lambda: by_samples(varies=False)),
    "input-bound": Pair(lambda: data_on(0, 1, 2, 3), lambda: data_on(2)),
    "lost": Pair(silent, lambda: silent(events=[(0, wire.Event(kind=DUMPED, at_ns=0))])),
    "network-slow": Pair(lambda: slow_link(0.0), lambda: slow_link(30.0)),
    "not-reduced": Pair(lambda: reported("not_reduced"), lambda: reported("comm_hook_set")),
    "other-bound": Pair(lambda: looked_at("other", "log"), lambda: looked_at("other", "cuda")),
    "pipeline-imbalance": Pair(lambda: pipeline([16, 16, 48, 48]), lambda: pipeline([48, 48, 48, 49])),
    "prefetch-missing": Pair(
        lambda: Sharded([MB] * 6, [12.0] * 6, forward_prefetch=False).evidence(**TWO_HOSTS),
        lambda: Sharded([MB] * 6, [1.0] * 6).evidence(**TWO_HOSTS),
    ),
    "processor-bound": Pair(lambda: waits(0, 1, 2, 3), lambda: waits(2)),
    "recompilation": Pair(lambda: compiling(8), lambda: compiling(2)),
    "replicas-differ": Pair(lambda: fingerprints(1, 1, 2), lambda: fingerprints(2)),
    "scaling-loss": Pair(
        lambda: Run([50 * MB], [1.0]).evidence(), lambda: Run([50 * MB], [1.0]).evidence(absences={"silent": [1]})
    ),
    "straggler": Pair(lambda: by_samples(varies=False), lambda: by_samples(varies=True)),
    "telemetry-loss": Pair(
        lambda: failed_run(dropped={1: 3}, emitted={1: 100}), lambda: failed_run(dropped={1: 0}, emitted={1: 100})
    ),
    "telemetry-overhead": Pair(lambda: rested(low=1.015), lambda: rested(low=1.0)),
    "time-outside-steps": Pair(lambda: time_outside(2000, completed=False), lambda: time_outside(2000, completed=True)),
    "unit-size": Pair(
        lambda: Sharded([MB // 2, *[MB // 20] * 16], [2.0] * 17, alpha_ms=3.0, blocks=True).evidence(**TWO_HOSTS),
        lambda: Sharded([MB // 2, *[2 * MB] * 16], [2.0] * 17, alpha_ms=0.1, blocks=True).evidence(**TWO_HOSTS),
    ),
    "unused-parameters": Pair(lambda: unused(["head"]), lambda: unused(["head"], [])),
    "utilisation-swings": Pair(lambda: swings(4), lambda: swings(1)),
}
CODES = [code for module in MODULES for code in module.CODES]
JUDGES = dict(zip(CODES, FINDINGS, strict=True))


@pytest.mark.parametrize("code", CODES)
def test_a_finding_stays_quiet_about_the_run_that_only_looks_like_it(code: str) -> None:
    guilty, innocent = PAIRS[code]
    assert [finding.code for finding in findings_in(JUDGES[code](guilty()))] == [code]
    assert findings_in(JUDGES[code](innocent())) == []

"""Whether the hosts' processors suffice for their ranks.

The evidence: threads that can run at once, the host's load, and waits that the kernel counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpobs import wire
from ddpobs.shared.processors import parse_processors
from ddpobs.shared.words import percent
from ddpobs.wire.facts import SettingFacts, read_facts
from ddpobs_server.analysis.evidence import Evidence

_DELAYED_SHARE = 0.1
"""Share of the steps' time, ready to run without a processor, above which a rank lacks processors."""


@dataclass(frozen=True)
class Shortage:
    """Lack of processors on one host.

    Attributes:
        facts: Figures for a finding's evidence.
        sentence: The fact that shows the lack, for a title.
    """

    facts: dict[str, Any]
    sentence: str


def shortage(evidence: Evidence) -> Shortage | str:
    """Return the host with the greatest lack of processors, or the reason why none is known.

    A host lacks processors if its ranks' training and communication threads are more than its processors, if its load
    is above them, or if the kernel's counters show ranks that wait for a processor.
    """
    hellos: dict[str, list[wire.Hello]] = {host: [] for host in sorted(set(evidence.hosts.values()))}
    for hello in evidence.hellos.values():
        hellos.setdefault(hello.host, []).append(hello)
    loads: dict[str, float] = {}
    for rank, pulse in evidence.pulses.items():
        if (known := evidence.hosts.get(rank)) is not None:
            loads[known] = max(_load(pulse), loads.get(known, 0.0))
    by_host = [_of_host(evidence, host, own, loads.get(host, 0.0)) for host, own in hellos.items()]
    lacking = [result for result in by_host if isinstance(result, Shortage)]
    if lacking:
        return max(lacking, key=lambda result: result.facts["threads_per_processor"])
    delayed = delayed_share(evidence)
    if delayed is not None and delayed > _DELAYED_SHARE:
        sentence = f"ranks wait for a processor in {percent(delayed)} of the steps' time"
        return Shortage({"run_delay_share": round(delayed, 4), "threads_per_processor": 0.0}, sentence)
    unknown = [result for result in by_host if result]
    if unknown or not by_host:
        return str(unknown[0]) if unknown else "the ranks' hosts are not recorded"
    return "every host has as many processors as threads"


def delayed_share(evidence: Evidence) -> float | None:
    """Return the share of the steps' time that ranks were ready to run without a processor; None if not recorded."""
    delay_ns = evidence.steps.run_delay_ns
    if not (recorded := delay_ns >= 0).any():
        return None
    took_ns = (evidence.steps.end_ns - evidence.steps.start_ns)[recorded]
    return float(delay_ns[recorded].sum() / max(1, int(took_ns.sum())))


def _of_host(evidence: Evidence, host: str, hellos: list[wire.Hello], load: float) -> Shortage | str:
    """Return the lack of one host; a reason if it is not known, empty if there is none."""
    settings = [read_facts(hello.settings, SettingFacts) for hello in hellos]
    cores = len(frozenset().union(*map(parse_processors, {own.processors for own in settings})))
    if not cores or not all(own.threads for own in settings):
        return f"processors and threads of host {host} are not recorded"
    gloo_threads = sum(hello.backend == "gloo" for hello in hellos)
    runnable = sum(own.threads for own in settings) + gloo_threads
    if max(float(runnable), load) <= cores:
        return ""
    facts = {
        "host": host,
        "processors": cores,
        "ranks_on_host": len(hellos),
        "threads": runnable,
        "load": round(load, 2) if load else None,
        "run_delay_share": _rounded(delayed_share(evidence)),
        "threads_per_processor": round(max(float(runnable), load) / cores, 2),
    }
    if load > runnable:
        return Shortage(facts, f"the load of host {host} is {load:.1f} on {cores} processors")
    parts = f"{runnable} threads of training and communication" if gloo_threads else f"{runnable} training threads"
    return Shortage(facts, f"{len(hellos)} ranks with {parts} share {cores} processors of host {host}")


def _load(pulse: wire.Pulse) -> float:
    return max(0.0, pulse.machine.load_milli / 1000) if pulse.machine is not None else 0.0


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)

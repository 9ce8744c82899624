"""The words of a comparison, which the page and the command print: the headline, each change, and what differs."""

from __future__ import annotations

from collections.abc import Sequence

from ddpobs.shared.words import percent
from ddpobs_server.analysis.comparison.compare import Change, Comparison
from ddpobs_server.analysis.comparison.facts import Difference

_MIN_MULTIPLE = 0.5
"""Minimum change that is named as a multiple: `2.2×`, not `122 %`."""
_MAX_MULTIPLE = 1000.0
"""Maximum multiple, and by its inverse the minimum, that an interval names; a wider one shows that little is known."""
_MAX_PRECISE = 0.1
"""Maximum change that is given with a decimal."""
_KINDS = {"compute": "computation of ", "comm": "communication of "}
_FACTS = {
    "world_size": "ranks",
    "hosts": "hosts",
    "device": "device",
    "backend": "backend",
    "settings.group_ranks": "ranks of the process group",
    "versions.torch": "version of torch",
}
_OF_MODULE = {
    "comm": "communication strategy",
    "buckets": "buckets",
    "size_bytes": "bytes of gradients",
    "bucket_sizes_mb": "sizes of the buckets in MB",
    "units": "units",
    "unit_sizes_mb": "sizes of the units in MB",
    "parameters": "parameters with gradients",
}
_JOB = ("parameters", "size_bytes")
"""Facts of a module that tell one model from another."""


def change_words(change: Change) -> str:
    """A change in words: `slower by 2.2× (1.9 to 2.5)`, `3.8× (0.9 to 12), not decided: it may be faster or slower`."""
    ratio, low, high = (change.ratio(ns) for ns in (change.b_ns - change.a_ns, change.low_ns, change.high_ns))
    if ratio is None or low is None or high is None:
        return change.verdict if change.verdict in ("slower", "faster") else ""
    if undecided := _undecided(change):
        multiple, reason = undecided
        return f"{multiple}, not decided: {reason}" if multiple else f"not decided: {reason}"
    if change.verdict == "same":
        return f"no difference seen, and one of {_size(change.ratio(change.smallest_ns) or 0.0)} would have been"
    if change.verdict == "slower" and ratio >= _MIN_MULTIPLE:
        return f"slower by {_multiple(ratio, low, high)}"
    low, high = sorted((abs(low), abs(high)))
    return f"{change.verdict} by {_size(ratio)} ({_size(low).removesuffix(' %')} to {_size(high)})"


def _undecided(change: Change) -> tuple[str, str] | None:
    """The change as a multiple, empty if a run has no such time, and why it is not decided; None if it is decided."""
    ratio, low, high = (change.ratio(ns) for ns in (change.b_ns - change.a_ns, change.low_ns, change.high_ns))
    if ratio is None or low is None or high is None or change.verdict not in ("same", "too-few"):
        return None
    if change.verdict == "same" and (change.ratio(change.smallest_ns) or 0.0) < _MIN_MULTIPLE:
        return None
    too_few = f"too few {'long ' if change.kind == 'long' else ''}steps"
    if not change.b_ns:
        return "", too_few
    is_either = low <= 0 <= high and change.smallest_ns
    return _multiple(ratio, low, high), "it may be faster or slower" if is_either else too_few


def headline(b: str, result: Comparison) -> str:
    """The comparison in one sentence: `after is slower by 2.2× (1.9 to 2.5): 139 → 309 ms a step`."""
    step, words = result.changes[0], change_words(result.changes[0])
    times = f"{_ms(step.a_ns)} → {_ms(step.b_ns)} ms a step"
    if step.verdict == "too-few":
        seen = f"{times}, but " if step.a_ns and step.b_ns else ""
        return f"Not decided: {seen}{result.too_few}"
    if undecided := _undecided(step):
        return f"Not decided: {times}, {': '.join(filter(None, undecided))}"
    return f"{words[0].upper()}{words[1:]}: {times}" if step.verdict == "same" else f"{b} is {words}: {times}"


def limit_words(result: Comparison, limit: float) -> str:
    """Whether a limit holds, in words: `kept`, `exceeded by step, backward`, `not decided, too few steps`."""
    if result.is_decided(limit):
        names = [_phase_title(name, result) for name in result.exceeded(limit)]
        return f"exceeded by {', '.join(names)}" if names else "kept"
    if result.is_too_short:
        return "not decided, too few steps"
    if result.is_disturbed:
        return "not decided, other programs may be the cause"
    step = result.changes[0]
    low, high = (100 * ns / step.a_ns for ns in (step.low_ns, step.high_ns))
    return f"not decided, the interval of the step spans it: {low:+.1f} to {high:+.1f} %"


def not_the_same_job(a: str, b: str, differences: Sequence[Difference]) -> str:
    """A sentence if the number of ranks or the model differs: their times are not comparable. Else empty."""
    reasons = [f"{each.a} ranks in {a}, {each.b} in {b}" for each in differences if each.name == "world_size"]
    facts = {each.name.removeprefix("layout."): each for each in differences if each.name.startswith("layout.")}
    sizes = {
        name.rpartition(".")[0]: each for fact in _JOB for name, each in facts.items() if name.endswith(f".{fact}")
    }
    only_a, only_b = ([name for name, each in sizes.items() if getattr(each, other) is None] for other in ("b", "a"))
    if only_a or only_b:
        reasons.append(f"model {', '.join(only_a) or 'none'} in {a}, {', '.join(only_b) or 'none'} in {b}")
    for module, each in sizes.items():
        if module not in only_a + only_b:
            what = _OF_MODULE[each.name.rpartition(".")[2]]
            reasons.append(f"{module} has {each.a:,} {what} in {a}, {each.b:,} in {b}")
    return f"Not the same job: {'; '.join(reasons)}" if reasons else ""


def change_title(change: Change, result: Comparison) -> str:
    """The name of a time for people: `moving data`, `computation of bucket 1: stem.weight`."""
    return _KINDS.get(change.kind, "") + _phase_title(change.name, result)


def _phase_title(name: str, result: Comparison) -> str:
    if name == "exposed_comm":
        return "moving data" if result.is_divided else "waiting for ranks and moving data"
    return "waiting for ranks" if name == "waiting" else name


def fact_title(name: str) -> str:
    """The name of a fact for people: `ranks`, `setting bucket_cap_mb`, `model: buckets`."""
    if name in _FACTS:
        return _FACTS[name]
    group, _, rest = name.partition(".")
    module, _, fact = rest.rpartition(".")
    if group == "layout":
        return f"{module}: {_OF_MODULE.get(fact, fact)}"
    return {"settings": f"setting {rest}", "versions": f"version of {rest}"}.get(group, name)


def _size(ratio: float) -> str:
    return percent(abs(ratio), 1 if abs(ratio) < _MAX_PRECISE else 0)


def _multiple(ratio: float, low: float, high: float) -> str:
    """A change and its interval as multiples of the first time: `2.2× (1.9 to 2.5)`."""
    least = f"under {1 / _MAX_MULTIPLE}" if 1 + low < 1 / _MAX_MULTIPLE else _times(1 + low)
    most = f"over {_MAX_MULTIPLE:,.0f}" if 1 + high > _MAX_MULTIPLE else _times(1 + high)
    return f"{_times(1 + ratio)}× ({least} to {most})"


def _times(multiple: float) -> str:
    return f"{multiple:.0f}" if multiple >= 10 else f"{multiple:.1f}" if multiple >= 0.1 else f"{max(0, multiple):.1g}"


def _ms(ns: float) -> str:
    ms = ns / 1e6
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 1 else f"{ms:.3f}"

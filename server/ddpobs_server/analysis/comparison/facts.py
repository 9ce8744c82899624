"""Differences of two runs besides their times: settings, versions, layout, and findings that came and went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddpobs import wire
from ddpobs.shared.words import parts_of, shown_findings

_ABOUT = ("tags", "note")
"""Settings that describe a run and change nothing in it."""
_GROUP_RANKS = "settings.group_ranks"
_SHOWN_SIZES = 8


class Difference(msgspec.Struct, frozen=True):
    """A fact that differs; None where a run lacks it."""

    name: str
    a: wire.Scalar | None
    b: wire.Scalar | None


def facts_of(hello: wire.Hello | None, layouts: Sequence[wire.Layout]) -> dict[str, wire.Scalar]:
    """Return the facts of a run that change its times, by name.

    Args:
        hello: Hello of its lowest rank.
        layouts: Layouts of all its modules and revisions; the latest of a module counts.
    """
    facts: dict[str, wire.Scalar] = {}
    if hello is not None:
        facts |= {"device": hello.device, "backend": hello.backend}
        facts |= {f"versions.{name}": version for name, version in hello.versions.items()}
        facts |= {f"settings.{name}": value for name, value in hello.settings.items() if name not in _ABOUT}
    for layout in latest(layouts).values():
        reduced, noun = _of_gradients(layout.buckets), parts_of(layout.buckets).noun
        sizes = [bucket.size_bytes for bucket in reduced]
        shown = ", ".join(f"{size / 1e6:.3g}" for size in sizes[:_SHOWN_SIZES])
        prefix = f"layout.{layout.name or layout.module}"
        facts[f"{prefix}.comm"] = layout.comm
        facts[f"{prefix}.{noun}s"] = len(sizes)
        facts[f"{prefix}.size_bytes"] = sum(sizes)
        facts[f"{prefix}.{noun}_sizes_mb"] = shown + (", …" if len(sizes) > _SHOWN_SIZES else "")
        facts[f"{prefix}.parameters"] = sum(len(bucket.parameters) for bucket in reduced)
    return facts


def _of_gradients(buckets: Sequence[wire.Bucket]) -> list[wire.Bucket]:
    """Return the rows that reduce gradients, each once: a unit with replicas reduces what it has scattered."""
    scattered = {bucket.unit for bucket in buckets if bucket.kind == "reduce_scatter"}
    return [
        bucket
        for bucket in buckets
        if bucket.kind in {"bucket", "reduce_scatter"} or (bucket.kind == "all_reduce" and bucket.unit not in scattered)
    ]


def latest(layouts: Sequence[wire.Layout]) -> dict[int, wire.Layout]:
    """Return the layout with the highest revision of each module."""
    return {layout.module: layout for layout in sorted(layouts, key=lambda layout: layout.revision)}


def differences(a: Mapping[str, wire.Scalar], b: Mapping[str, wire.Scalar]) -> list[Difference]:
    """Return the facts that differ, those of the first run first.

    The number of ranks of a process group that holds all ranks is left out: it is the world size.
    """
    of_world = [facts.get(_GROUP_RANKS) == facts.get("world_size") for facts in (a, b)]
    names = [name for name in [*a, *(name for name in b if name not in a)] if name != _GROUP_RANKS or not all(of_world)]
    return [Difference(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def of_one_model(
    a: Mapping[str, wire.Scalar], b: Mapping[str, wire.Scalar]
) -> tuple[Mapping[str, wire.Scalar], Mapping[str, wire.Scalar]]:
    """Return the facts of two runs with one module each under one name, so that different models are in one row."""
    names = [{_module(name) for name in facts if name.startswith("layout.")} for facts in (a, b)]
    if [len(modules) for modules in names] != [1, 1] or names[0] == names[1]:
        return a, b
    first, second = (
        {
            f"layout.model.{name.rpartition('.')[2]}" if _module(name) in modules else name: value
            for name, value in facts.items()
        }
        for facts, modules in zip((a, b), names, strict=True)
    )
    return first, second


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def same_buckets(a: Sequence[wire.Layout], b: Sequence[wire.Layout]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the buckets with the same parameters in both runs: (module, bucket) of the first run by the second's."""
    of_a = {names: key for key, names in _parameters(a).items()}
    return {key: of_a[names] for key, names in _parameters(b).items() if names in of_a}


def _parameters(layouts: Sequence[wire.Layout]) -> dict[tuple[int, int], tuple[str, ...]]:
    return {
        (module, index): (
            layout.name,
            bucket.kind,
            bucket.unit,
            *sorted(parameter.name for parameter in bucket.parameters),
        )
        for module, layout in latest(layouts).items()
        for index, bucket in enumerate(layout.buckets)
    }


def findings_that_changed(
    diagnosis_a: Mapping[str, Any], diagnosis_b: Mapping[str, Any]
) -> dict[str, list[Mapping[str, Any]]]:
    """Return the shown findings that `came` (only the second run has them), `went` (only the first), and `stayed`.

    A finding is the same if code, phase and ranks are.
    """

    def key(finding: Mapping[str, Any]) -> tuple[Any, ...]:
        return finding["code"], finding["phase"], *finding["ranks"]

    a, b = shown_findings(diagnosis_a), shown_findings(diagnosis_b)
    known_a, known_b = {key(finding) for finding in a}, {key(finding) for finding in b}
    return {
        "came": [finding for finding in b if key(finding) not in known_a],
        "went": [finding for finding in a if key(finding) not in known_b],
        "stayed": [finding for finding in b if key(finding) in known_a],
    }

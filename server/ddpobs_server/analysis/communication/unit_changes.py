"""What changes of a fully sharded model's units would have saved in each of its latest steps.

Each saving is at most the time that training waits for the collectives which the change makes shorter or spares.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from ddpobs.whatif.link import Link, fit_link
from ddpobs_server.analysis.communication.unit_steps import GATHERS, UnitSteps, free_ns
from ddpobs_server.analysis.steps.joined_steps import Floats

LIMITS_MB = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
"""Sizes up to which neighbouring units are merged."""
_FORWARD, _BACKWARD = GATHERS
_ROOT = "(root)"
_WIDE = ("float32", "float64")


def hidden_ns(units: UnitSteps) -> Floats:
    """Return the part of each exposed all-gather that a launch right after the one before it hides.

    The bytes move meanwhile while the rank computes, and no other collective moves. So at most the time without
    collectives between the two launches is saved. Where they block, torch's own prefetch in backward already
    launches an all-gather before the computation that could hide it: then it is that computation's time.

    Returns:
        Shape [steps, collectives]; 0 for other collectives, and for the first all-gather of a pass.
    """
    saved_ns = np.zeros(units.exposed_ns.shape)
    for kind in GATHERS:
        places = [place for place, row in enumerate(units.rows) if row.kind == kind]
        for before, place in pairwise([None, *places]):
            assert place is not None
            if _is_prefetched(units, place):
                began_ns, ended_ns = units.done_ns[:, place], units.launched_ns[:, place + 1]
            elif before is not None:
                began_ns, ended_ns = units.done_ns[:, before], units.launched_ns[:, place]
            else:
                continue
            saved_ns[:, place] = np.minimum(units.exposed_ns[:, place], free_ns(units, began_ns, ended_ns))
    return saved_ns


def _is_prefetched(units: UnitSteps, place: int) -> bool:
    """Whether a blocking all-gather in backward comes before the computation of another unit, which reduces next."""
    if not units.blocks[place] or units.rows[place].kind != _BACKWARD or place + 1 == len(units.rows):
        return False
    following = units.rows[place + 1]
    return following.kind not in GATHERS and following.unit != units.rows[place].unit


def links_of(units: UnitSteps) -> dict[str, Link]:
    """Fit latency and bandwidth of each kind of collective; all-gathers in forward and in backward are one kind."""
    sizes = np.array([float(row.size_bytes) for row in units.rows])
    typical_ns = np.median(units.moving_ns, axis=0)
    by_kind: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(units.rows):
        by_kind.setdefault(GATHERS if row.kind in GATHERS else (row.kind,), []).append(place)
    return {
        kind: link
        for kinds, places in by_kind.items()
        for link in [fit_link(sizes[places], typical_ns[places])]
        for kind in kinds
    }


def merged_saving_ns(units: UnitSteps, links: Mapping[str, Link], limit_bytes: float) -> Floats:
    """Return what merging neighbours up to this size would have saved in each step, shape [steps].

    Each collective that goes saves its latency, as far as training waits for it. The root's unit stays: it is gathered
    for the whole forward. Where latency is not known apart from the bytes, nothing is saved.
    """
    saved_ns, sizes = np.zeros(len(units.exposed_ns)), unit_sizes(units)
    for kind, link in links.items():
        total = 0.0
        for place in [place for place, row in enumerate(units.rows) if row.kind == kind and row.unit != _ROOT]:
            size = sizes[units.rows[place].unit]
            if total and total + size <= limit_bytes:
                total += size
                saved_ns += np.minimum(link.alpha_ns, units.exposed_ns[:, place])
            else:
                total = size
    return saved_ns


def kept_saving_ns(units: UnitSteps) -> Floats:
    """Return what units that stay gathered until backward would have saved, shape [steps]."""
    return _saved_ns(units, units.moving_ns * [row.kind == _BACKWARD for row in units.rows])


def kept_bytes(units: UnitSteps) -> int:
    """Return the bytes of the units that are gathered again in backward."""
    sizes = unit_sizes(units)
    return sum(sizes[unit] for unit in {row.unit for row in units.rows if row.kind == _BACKWARD})


def half_saving_ns(units: UnitSteps, links: Mapping[str, Link]) -> Floats:
    """Return what half of the bytes of single and double precision would have saved, shape [steps]."""
    spared_ns = [links[row.kind].beta_ns * row.size_bytes / 2 * (row.dtype in _WIDE) for row in units.rows]
    return _saved_ns(units, np.broadcast_to(spared_ns, units.exposed_ns.shape))


def _saved_ns(units: UnitSteps, spared_ns: Floats) -> Floats:
    """Return how much less training waits if collectives take less time, shape [steps].

    What a collective takes less, the ones that queue behind it end earlier, too. After a time in which nothing moved
    that is spent.

    Args:
        units: The collectives.
        spared_ns: What each takes less, shape [steps, collectives].
    """
    saved_ns, unspent_ns = np.zeros(len(spared_ns)), np.zeros(len(spared_ns))
    for place, (exposed_ns, spared) in enumerate(zip(units.exposed_ns.T, spared_ns.T, strict=True)):
        if place:
            idle_ns = (units.launched_ns[:, place] - units.done_ns[:, place - 1]).max(axis=1)
            unspent_ns[idle_ns > 0] = 0.0
        unspent_ns += spared
        spent_ns = np.minimum(exposed_ns, unspent_ns)
        saved_ns += spent_ns
        unspent_ns -= spent_ns
    return saved_ns


def unit_sizes(units: UnitSteps) -> dict[str, int]:
    """Return the size of each unit, in the order of forward: of its largest collective."""
    sizes: dict[str, int] = {}
    for row in units.rows:
        sizes[row.unit] = max(sizes.get(row.unit, 0), row.size_bytes)
    return sizes

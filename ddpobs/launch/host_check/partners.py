"""Partners of each rank for the exchange of data: hosts meet in turn, as in a tournament.

An all-reduce takes equally long on all ranks, so it cannot name the host that delays it. A pair of hosts can: the slow
one is slow with each partner, and the others with that one alone.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_ROUNDS = 3
"""Maximum number of partners: a fast host among many meets three slow ones hardly ever."""
MIN_GROUPS = 3
"""Minimum number of hosts of which one can be named."""


def groups_of(hosts: Sequence[str]) -> list[int]:
    """Return the group of each rank: its host, or on a single host the rank itself."""
    if len(set(hosts)) == 1:
        return list(range(len(hosts)))
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [numbers[host] for host in hosts]


def rounds(groups: Sequence[int]) -> list[list[int | None]]:
    """Return the partner of each rank in each round, of another group; None for one that has no partner.

    The ranks of two groups are paired in their order, so that all of them load the link. Source: the circle method
    for round-robin tournaments.
    """
    members: dict[int, list[int]] = {}
    for rank, group in enumerate(groups):
        members.setdefault(group, []).append(rank)
    names = list(members)
    around = len(names) - 1 + len(names) % 2
    """Number of groups on the circle; with an odd number of them, one rests in each round."""
    result: list[list[int | None]] = []
    for turn in range(min(MAX_ROUNDS, around)):
        partners: list[int | None] = [None] * len(groups)
        for index, name in enumerate(names[:around]):
            other = (2 * turn - index) % around
            if other == index:
                other = around
            if other < len(names):
                for one, two in zip(members[name], members[names[other]], strict=False):
                    partners[one], partners[two] = two, one
        result.append(partners)
    return result

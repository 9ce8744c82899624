"""Process groups that reduce gradients apart from each other: each is compared by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpobs import wire
from ddpobs.shared.words import format_ranks
from ddpobs.wire.facts import SettingFacts, read_facts


@dataclass(frozen=True)
class RankGroup:
    """Ranks that reduce gradients together, and not with the rest of the world.

    Attributes:
        ranks: In rising order.
    """

    ranks: tuple[int, ...]

    @property
    def members(self) -> str:
        """Its ranks in words."""
        return f"members of its process group, {format_ranks(self.ranks)}"


def groups_of(hellos: Mapping[int, wire.Hello], world_size: int) -> list[RankGroup]:
    """Return the process groups, by their first rank; empty if they are the world, or not known of all ranks.

    Args:
        hellos: Identity of each rank, which tells the size and the first rank of its group.
        world_size: Number of ranks.
    """
    facts = {rank: read_facts(hello.settings, SettingFacts) for rank, hello in hellos.items()}
    if any(known.group_first is None or known.group_ranks is None for known in facts.values()):
        return []
    by_first: dict[int, list[int]] = {}
    for rank, known in sorted(facts.items()):
        by_first.setdefault(known.group_first or 0, []).append(rank)
    if any(len(ranks) > (facts[ranks[0]].group_ranks or 0) for ranks in by_first.values()):
        return []
    groups = [RankGroup(tuple(ranks)) for _, ranks in sorted(by_first.items()) if len(ranks) > 1]
    return groups if any(len(group.ranks) < world_size for group in groups) else []

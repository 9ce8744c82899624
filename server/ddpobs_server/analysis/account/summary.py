"""The account of a run in words: goodput, what the ranks achieve together in steps, and the loss."""

from __future__ import annotations

from ddpobs.shared.quantities import duration, rank_time
from ddpobs.shared.words import percent
from ddpobs_server.analysis.account.parts import TITLES, is_lost
from ddpobs_server.analysis.account.run_account import RunAccount
from ddpobs_server.analysis.account.work import work_of

_MAX_LOSSES = 3
_MIN_SHARE = 0.005
"""Share of the run from which a loss is named."""
_MIN_LOSS = 0.05
"""Share of the steps' time lost to waiting and moving from which it is stated."""


def account_summary(account: RunAccount) -> str:
    """Return a few sentences about an account; empty if nothing is known."""
    if account.goodput is None:
        return ""
    wall = duration(account.until_ns - account.began_ns)
    goodput = f"{percent(account.goodput)} of {wall} went into steps that no restart repeated (goodput)."
    return " ".join(filter(None, (goodput, _work(account), _loss(account))))


def _work(account: RunAccount) -> str:
    """What the ranks achieve together in their steps; empty if they lose little."""
    work = work_of(account)
    if work.ranks < 2 or 1 - work.efficiency < _MIN_LOSS:
        return ""
    return f"In steps {work.verdict}: {work.losses}."


def _loss(account: RunAccount) -> str:
    """The rank time that is lost, with its largest parts."""
    lost = {part: ns for part, ns in account.parts.items() if is_lost(part)}
    largest = sorted((part for part in lost if account.share(part) >= _MIN_SHARE), key=lambda part: -lost[part])
    if not largest:
        return ""
    named = ", ".join(
        f"{TITLES[part].removeprefix('steps: ')} {percent(account.share(part))}" for part in largest[:_MAX_LOSSES]
    )
    return f"Lost: {rank_time(sum(lost.values()))}, most of it {named}."

"""Causes of a slow input, from the counts of torch's loaders and the looks at the training loop.

A cause is stated if it explains at least half of the time in question. Each has a remedy, and bounds of the time that
the remedy saves where they follow from the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from ddpobs import wire
from ddpobs.shared.words import percent
from ddpobs_server.analysis.causes.code_places import Places
from ddpobs_server.analysis.finding import Gain

_MIN_SHARE = 0.5
"""Minimum share of the time that a cause explains."""
_FEW_BATCHES = 4
"""Batches per iterator below which an iterator is short-lived."""


@dataclass(frozen=True)
class InputCause:
    """A cause, in words, with its remedy.

    Attributes:
        saved_ns: Least and most time per step that the remedy saves; None if the data do not bound it.
    """

    name: str
    words: str
    remedy: str
    saved_ns: tuple[float, float] | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    def gain(self, step_ns: float) -> Gain | None:
        """Return the middle of the bounds, with half of their distance as the error."""
        if self.saved_ns is None or sum(self.saved_ns) <= 0:
            return None
        least, most = self.saved_ns
        middle = (least + most) / 2
        return Gain(round(middle), round(middle / step_ns, 4), round((most - least) / 2 / middle, 4))


@dataclass(frozen=True)
class InputUse:
    """Use of loaders by all ranks.

    Attributes:
        inputs: Counts of torch's loaders, one per rank that used them.
        places: Looks in the data phase.
        data_ns: Time of a step in the data phase.
        rest_ns: Time of a step in all other phases.
        ranks_per_host: Most ranks on a host, which share its processors.
    """

    inputs: Sequence[wire.Input]
    places: Places
    data_ns: float
    rest_ns: float
    ranks_per_host: int = 1

    def total(self, *names: str) -> int:
        """Sum of counts over ranks."""
        return sum(getattr(counts, name) for counts in self.inputs for name in names)

    def share_of_input(self, *names: str) -> float:
        """Share of these times in all time that the loaders took."""
        return min(1.0, self.total(*names) / max(1, self.total("creating_ns", "fetching_ns", "closing_ns")))

    @property
    def workers(self) -> int:
        """Fewest workers of a rank's loader."""
        return min((counts.workers for counts in self.inputs), default=wire.UNKNOWN)

    @property
    def processors(self) -> int:
        """Processors for each rank."""
        return max(1, min((counts.cpus for counts in self.inputs), default=1) // self.ranks_per_host)


def cause_of(use: InputUse) -> InputCause | None:
    """Return the first cause that applies; None if none is known."""
    rules: tuple[Callable[[InputUse], InputCause | None], ...] = (_own_loader, _new_iterators, _slow_collate)
    rules += (_slow_worker, _few_workers)
    return next((cause for rule in rules if (cause := rule(use)) is not None), None)


def _own_loader(use: InputUse) -> InputCause | None:
    """An iterator that is not torch's."""
    if not use.places.is_judged or use.places.iterating_share < _MIN_SHARE:
        return None
    place = next(place for place, _ in use.places.times_ns.most_common() if place.iterates)
    remedy = (
        "Prepare the next batch while the step computes: in a thread with a queue, or in the worker processes of "
        "torch's DataLoader (an IterableDataset wraps a generator)."
    )
    if use.places.copy_share >= _MIN_SHARE:
        remedy = "Most of it copies or converts tensors: use pinned memory and non_blocking=True. " + remedy
    return InputCause(
        "own-loader",
        "an iterator that is not torch's prepares batches in the training thread"
        + (f", at {place}" * bool(place.text)),
        remedy,
        (min(use.data_ns, use.rest_ns), use.data_ns),
        {"places": use.places.listed(), "looks": use.places.in_phase},
    )


def _new_iterators(use: InputUse) -> InputCause | None:
    """Iterators that serve few batches each, so that starting workers takes the time."""
    batches, iterators = use.total("batches"), use.total("iterators")
    starting_ns = use.total("creating_ns", "closing_ns") + _excess_of_first_ns(use)
    share = min(1.0, starting_ns / max(1, use.total("creating_ns", "fetching_ns", "closing_ns")))
    short_lived = batches < _FEW_BATCHES * iterators
    if use.workers <= 0 or not (short_lived or share >= _MIN_SHARE):
        return None
    begins, remedy = _beginning(use, is_each_step=batches < 2 * iterators)
    return InputCause(
        "new-iterators",
        f"each iterator of the loader serves {batches / max(1, iterators):.1f} batches, and {begins}: "
        f"{starting_ns / max(1, iterators) / 1e9:.2g} s each time",
        remedy,
        _saved_ns(use, share * use.data_ns, is_short_lived=short_lived),
        {"batches": batches, "iterators": iterators, "starting_share": round(share, 4)},
    )


def _saved_ns(use: InputUse, starting_ns: float, *, is_short_lived: bool) -> tuple[float, float]:
    """Least and most saving: the first start remains. Iterators of a few batches never come to work ahead, either."""
    of_each = use.total("iterators") / max(1, len(use.inputs))
    return starting_ns * (1 - 1 / max(1.0, of_each)), use.data_ns if is_short_lived else starting_ns


def _excess_of_first_ns(use: InputUse) -> float:
    """Time until the first batches of iterators came, above that of as many later batches."""
    first_ns, iterators = use.total("first_ns"), use.total("iterators")
    later = use.total("batches") - iterators
    if not first_ns or later <= 0:
        return 0.0
    return max(0.0, first_ns - iterators * (use.total("fetching_ns") - first_ns) / later)


def _beginning(use: InputUse, *, is_each_step: bool) -> tuple[str, str]:
    """How iterators begin, and the remedy."""
    if is_each_step:
        remedy = "Keep one iterator: loop with `for batch in loader`, or call iter(loader) once."
        return "starts its workers anew", f"{remedy} More workers make it slower."
    if all(counts.persistent for counts in use.inputs):
        return "waits until a worker has its first batch", "Make epochs longer, so that training waits less often."
    remedy = "Set persistent_workers=True, so that the workers outlive an epoch, or make epochs longer."
    return "starts its workers anew", f"{remedy} More workers make it slower."


def _slow_collate(use: InputUse) -> InputCause | None:
    """A `collate_fn` that takes most of the time, in the training process."""
    share = use.share_of_input("collating_ns")
    if use.workers != 0 or share < _MIN_SHARE:
        return None
    most_ns = share * use.data_ns
    return InputCause(
        "slow-collate",
        f"collate_fn takes {percent(share)} of that time, in the training process",
        "Make collate_fn cheaper (stack tensors once), or let worker processes call it: num_workers=1 and more.",
        (min(most_ns, use.rest_ns), most_ns),
        {"collating_share": round(share, 4)},
    )


def _slow_worker(use: InputUse) -> InputCause | None:
    """One worker that training waits for while the batches of the others have come."""
    alone_ns: Counter[int] = Counter()
    for counts in use.inputs:
        alone_ns.update(dict(enumerate(counts.alone_ns)))
    if use.workers < 2 or not alone_ns:
        return None
    worker, slowest_ns = alone_ns.most_common(1)[0]
    share = slowest_ns / max(1, use.total("fetching_ns"))
    if share < _MIN_SHARE:
        return None
    most_ns = share * use.share_of_input("fetching_ns") * use.data_ns
    return InputCause(
        "slow-worker",
        f"{percent(share)} of the waiting for batches is for worker {worker}, while the others' batches have come",
        f"Look at the samples that worker {worker} reads (its shard, its files); balance them over workers. "
        "in_order=False lets training take the batches that are there.",
        (most_ns * (1 - 1 / use.workers), most_ns),
        {"worker": worker, "alone_share": round(share, 4), "workers": use.workers},
    )


def _few_workers(use: InputUse) -> InputCause | None:
    """Workers that prepare batches more slowly than training takes them."""
    workers = use.workers
    if workers < 0 or use.rest_ns <= 0:
        return None
    batch_ns = workers * (use.data_ns + use.rest_ns) if workers else use.data_ns
    needed = max(workers + 1, ceil(batch_ns / use.rest_ns))
    least_step_ns = max(use.rest_ns, batch_ns / max(workers, use.processors))
    return InputCause(
        "few-workers",
        f"each rank's loader has {workers} worker{'s' * (workers != 1)}, which do{'es' * (workers == 1)} not keep up"
        if workers
        else "the loader has no workers: the training thread prepares each batch",
        _more_workers(use, batch_ns, needed),
        (max(0.0, use.data_ns + use.rest_ns - least_step_ns), use.data_ns),
        {"workers": workers, "needed_workers": needed, "batch_ns": round(batch_ns), "processors": use.processors},
    )


def _more_workers(use: InputUse, batch_ns: float, needed: int) -> str:
    """Advise as many workers as keep up, but no more than a rank has processors."""
    advised = min(needed, use.processors)
    times = f"a batch takes {batch_ns / 1e6:.3g} ms of a worker, the rest of a step {use.rest_ns / 1e6:.3g} ms"
    if advised == needed:
        return f"Set num_workers={needed}: {times}."
    cheaper = "Make samples or collate_fn cheaper"
    advice = f"Set num_workers={advised}. {cheaper}, too" if advised > use.workers else cheaper
    has = f"A rank has {use.processors} processor{'s' * (use.processors != 1)} here"
    return (
        f"{advice}: {times}. {has}: more workers help "
        f"only as far as samples wait for files or the network; {needed} would keep up then."
    )

"""The fitted model of a run's steps, the changes that it can be asked for, and its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddpobs.whatif.link import Floats, Ints, Link
from ddpobs.whatif.repair import Slowdown


@dataclass(frozen=True)
class Typical:
    """One typical step.

    Attributes:
        arrival_ns: Computation from the first gradient to each parameter's, on the slowest rank, without the slowdown
            beside communication; in the order of the buckets, shape [parameters].
        sizes: Bytes of each gradient, same shape.
        bucket: Index of the present bucket of each, rising, same shape.
        link: The run's link.
        contention_ns: Computation that a byte costs which moves beside it, in ns.
        base_ns: Rest of the step: its time without that from the first gradient to the last completion.
        drag: How many times as long bytes move beside computation.
    """

    arrival_ns: Floats
    sizes: Floats
    bucket: Ints
    link: Link
    contention_ns: float
    base_ns: float
    drag: float = 1.0

    def slowdown(self, link: Link) -> float:
        """Return the extra time that computation takes while a link moves bytes, as a share.

        Computation keeps half of the time at least: two threads share one processor.
        """
        lost = min(0.5, self.contention_ns / link.beta_ns) if link.beta_ns else 0.0
        return lost / (1 - lost)

    def with_contention_of(self, factor: float) -> Typical:
        """Return the same step with `factor` times the contention."""
        return replace(self, contention_ns=self.contention_ns * factor)

    def dragged(self) -> Typical:
        """Return the same step if bytes move as they do because computation has half of the processor beside them."""
        return replace(self, link=replace(self.link, beta_ns=self.link.beta_ns / 2), drag=2.0)


@dataclass(frozen=True)
class Fitted:
    """A run's model.

    Attributes:
        typical: Fitted to all steps.
        variants: Fitted to all but one block of steps, for each block, and with the most latency that explains them.
        step_ns: Median step.
        slowdown: What slow ranks cost; None if the ranks' own times are not known.
        noise_ns: Error of the mean of all blocks' steps as a prediction of the left-out block's.
        replay_error_ns: Difference between the replayed and the measured exposed communication.
        exposed_ns: Measured exposed communication.
        slowdown_is_known: Whether the slowdown was fitted. If not it is 0, and the interval counts its possible range.
        parameters_known: Whether the arrival of each parameter was measured. If not, a "parameter" is a whole bucket.
        world_size: Number of ranks.
        strategy: Name of the communication strategy.
        batches: Batches whose gradients are added before they are reduced.
        optimizer_ns: Time of the optimizer in a step.
        find_unused_ns: Time of a step that `find_unused_parameters` takes; None if it is off or not known.
        on_processor: Whether the gradients are on processors, where a strategy's computation takes time.
        own_ns: Own time of each rank by phase, shape [steps, ranks, phases]; None if it is not known.
        phases: Names of the phases.
    """

    typical: Typical
    variants: tuple[Typical, ...]
    step_ns: float
    slowdown: Slowdown | None
    noise_ns: float
    replay_error_ns: float
    exposed_ns: float
    slowdown_is_known: bool
    parameters_known: bool
    world_size: int
    strategy: str = "all_reduce"
    batches: int = 1
    optimizer_ns: float = 0.0
    find_unused_ns: float | None = None
    on_processor: bool = True
    own_ns: Floats | None = None
    phases: tuple[str, ...] = ()

    @property
    def moving_ns(self) -> float:
        """Time of all transfers of a typical step, one after the other."""
        buckets = len(np.unique(self.typical.bucket))
        return self.typical.link.alpha_ns * buckets + self.typical.link.beta_ns * float(self.typical.sizes.sum())


@dataclass(frozen=True)
class Change:
    """What would be different; None leaves a thing as it is. All given things change together.

    Attributes:
        caps_mb: Limits of the first bucket, the second, …, in MB of 2**20 bytes; the last holds for all further ones.
            One is torch's `bucket_cap_mb`, several its `bucket_cap_mb_list`.
        strategy: Name of a strategy of `STRATEGY_COSTS`.
        batches: Batches whose gradients are added before they are reduced.
        groups: Process groups that take buckets in turn.
        world_size: Number of ranks.
        link_gbps: Gigabits a second of the link between ranks.
        link_factor: The link moves so many times the bytes a second; not with `link_gbps`.
        repaired_rank: Index of a rank that works like the others' median.
        repaired_phase: Only this phase of it, and only half of its excess.
        find_unused: False to switch `find_unused_parameters` off.
    """

    caps_mb: tuple[float, ...] | None = None
    strategy: str | None = None
    batches: int | None = None
    groups: int | None = None
    world_size: int | None = None
    link_gbps: float | None = None
    link_factor: float | None = None
    repaired_rank: int | None = None
    repaired_phase: str | None = None
    find_unused: bool | None = None


@dataclass(frozen=True)
class Prediction:
    """A predicted step. Times are those of one batch: a step of k batches takes k times as long.

    Attributes:
        step_ns: Time of a batch.
        low_ns: Lower end of its interval.
        high_ns: Upper end.
        now_ns: Time of a batch as the run is.
        exposed_ns: Communication of a synchronised step that backward does not hide.
        ready_ns: Readiness of each bucket since the first gradient, shape [buckets].
        begun_ns: Begin of its transfer, same shape.
        done_ns: End of its transfer, same shape.
        bucket_bytes: Bytes of each bucket's gradients, same shape.
        batches: Batches of the step.
    """

    step_ns: float
    low_ns: float
    high_ns: float
    now_ns: float
    exposed_ns: float
    ready_ns: Floats
    begun_ns: Floats
    done_ns: Floats
    bucket_bytes: Floats
    batches: int = 1

    @property
    def saved_ns(self) -> float:
        """Predicted saving of a batch; negative for a loss."""
        return self.now_ns - self.step_ns

    @property
    def saved_ratio(self) -> float:
        """The same as a share of a batch's time."""
        return self.saved_ns / self.now_ns

    @property
    def error_ns(self) -> float:
        """Half of the interval's width."""
        return (self.high_ns - self.low_ns) / 2

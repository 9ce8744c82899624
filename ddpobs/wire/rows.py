"""The tables of a batch: a row per step, per bucket of a step, and per other communication."""

from __future__ import annotations

from ddpobs.wire import columns
from ddpobs.wire.columns import added_later
from ddpobs.wire.fields import (
    UNKNOWN,
    CommKinds,
    Counts,
    CountsOrUnknown,
    Durations,
    DurationsOrUnknown,
    Indexes,
    SignedDurations,
    StepNumbers,
    StepNumbersOrUnknown,
    Times,
    TimesBetween,
)


class Steps(columns.Columns):
    """One row per step. The six phases add up to `end_ns - start_ns`.

    The `own` columns cover the window from the end of the last full synchronisation to the readiness of the last
    bucket, less time blocked in other collectives: time for which this rank alone is responsible.

    The columns from `running_ns` on explain own time. Those of the training thread cover the time from the end of the
    previous synchronised backward to the end of this one. They are `UNKNOWN` if the system does not report them.

    Attributes:
        step: Number of the step.
        collective: Number of the step's synchronised backward within the attempt, by which ranks are joined; `UNKNOWN`
            if none ran.
        start_ns: Begin of the step on the rank's monotonic clock.
        end_ns: End of the step on the rank's monotonic clock.
        data_ns: Time in the phase data.
        forward_ns: Time in the phase forward.
        backward_ns: Time in the phase backward.
        exposed_comm_ns: Time of communication that backward did not hide.
        optimizer_ns: Time in the phase optimizer.
        other_ns: Time of the step that belongs to no other phase.
        own_ns: Own time; `UNKNOWN` if its window has no clean start.
        own_data_ns: Own time in the phase data; `UNKNOWN` as `own_ns`.
        own_forward_ns: Own time in the phase forward; `UNKNOWN` as `own_ns`.
        own_backward_ns: Own time in the phase backward; `UNKNOWN` as `own_ns`.
        own_optimizer_ns: Own time in the phase optimizer; `UNKNOWN` as `own_ns`.
        own_other_ns: Own time in no other phase; `UNKNOWN` as `own_ns`.
        comm_ns: Time in which a bucket's communication was under way; `UNKNOWN` if it was not observed.
        micro_steps: Number of backward passes.
        samples: Number of samples.
        flags: Sum of 1, if gradients were reduced, and 2, if own time has no clean start.
        running_ns: Time of the training thread on a processor; `UNKNOWN` if not reported.
        run_delay_ns: Time in which the training thread was ready to run and had no processor, with `throttled_ns`;
            `UNKNOWN` if not reported.
        preemptions: Number of involuntary switches to another thread, read in every eighth step at least; `UNKNOWN` if
            not reported.
        major_faults: Number of page faults that read a disk, read in every eighth step at least; `UNKNOWN` if not
            reported.
        throttled_ns: Time in which a processor quota held up the control group; `UNKNOWN` if not reported.
        collections: Number of the process's garbage collections; `UNKNOWN` if not reported.
        collecting_ns: Time in the process's garbage collections; `UNKNOWN` if not reported.
        elements: Number of elements of the inputs' tensors, over all micro-steps; `UNKNOWN` if not reported.
        longest: Size of the largest dimension of an input, without the rows; `UNKNOWN` if not reported.
        schedule_ns: Time in a pipeline's schedule; `UNKNOWN` without one.
        computing_ns: Time in the phases forward and backward of a schedule; `UNKNOWN` without one.
        send_wait_ns: Time of waits until another rank took a message; `UNKNOWN` if not reported.
        receive_wait_ns: Time of waits for another rank's message; `UNKNOWN` if not reported.
        compile_ns: Part of own time in torch.compile; `UNKNOWN` if not reported.
    """

    step: StepNumbers
    collective: StepNumbersOrUnknown
    start_ns: Times
    end_ns: Times
    data_ns: Durations
    forward_ns: Durations
    backward_ns: Durations
    exposed_comm_ns: Durations
    optimizer_ns: Durations
    other_ns: Durations
    own_ns: DurationsOrUnknown
    own_data_ns: SignedDurations
    own_forward_ns: SignedDurations
    own_backward_ns: SignedDurations
    own_optimizer_ns: SignedDurations
    own_other_ns: SignedDurations
    comm_ns: DurationsOrUnknown
    micro_steps: Counts
    samples: Counts
    flags: Counts
    running_ns: DurationsOrUnknown = added_later(UNKNOWN)
    run_delay_ns: DurationsOrUnknown = added_later(UNKNOWN)
    preemptions: CountsOrUnknown = added_later(UNKNOWN)
    major_faults: CountsOrUnknown = added_later(UNKNOWN)
    throttled_ns: DurationsOrUnknown = added_later(UNKNOWN)
    collections: CountsOrUnknown = added_later(UNKNOWN)
    collecting_ns: DurationsOrUnknown = added_later(UNKNOWN)
    elements: CountsOrUnknown = added_later(UNKNOWN)
    longest: CountsOrUnknown = added_later(UNKNOWN)
    schedule_ns: DurationsOrUnknown = added_later(UNKNOWN)
    computing_ns: DurationsOrUnknown = added_later(UNKNOWN)
    send_wait_ns: DurationsOrUnknown = added_later(UNKNOWN)
    receive_wait_ns: DurationsOrUnknown = added_later(UNKNOWN)
    compile_ns: DurationsOrUnknown = added_later(UNKNOWN)


class Spans(columns.Columns):
    """One row per step and bucket.

    Attributes:
        step: Number of the step.
        module: Number of the DDP module in its process.
        revision: Number of the layout within its module.
        bucket: Index of the bucket in its layout.
        ready_ns: Readiness of the bucket's last gradient on the rank's monotonic clock.
        launched_ns: Hand-over to the process group on the rank's monotonic clock.
        started_ns: Begin of the communication on the rank's monotonic clock; `UNKNOWN` if the backend does not report
            it.
        done_ns: End of the communication on the rank's monotonic clock.
        waited_ns: Time in which training waited for it; `UNKNOWN` for a bucket, which is waited for after the last
            readiness.
    """

    step: StepNumbers
    module: Indexes
    revision: Counts
    bucket: Indexes
    ready_ns: Times
    launched_ns: TimesBetween
    started_ns: Times
    done_ns: Times
    waited_ns: DurationsOrUnknown = added_later(UNKNOWN)


class Comms(columns.Columns):
    """Communication other than gradient buckets.

    Attributes:
        step: Number of the step.
        module: Number of the DDP module in its process.
        kind: Index of the kind: 0 for buffers, 1 for the map of unused parameters, 2 for a collective of user code.
        launched_ns: Begin on the rank's monotonic clock.
        done_ns: End on the rank's monotonic clock.
    """

    step: StepNumbers
    module: Indexes
    kind: CommKinds
    launched_ns: Times
    done_ns: Times

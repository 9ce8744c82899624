"""The step under way: whatever is true of one step alone is here, and goes with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpobs.clocks import Stamp
from ddpobs.steps.backward_record import BackwardRecord
from ddpobs.steps.counters import Reading
from ddpobs.steps.raw_step import DATA, EVALUATION, OTHER, Position, RawStep, Segment
from ddpobs.wire import COMM_KINDS

MAX_SWITCHES = 100_000
"""Switches of a step that never synchronises, some 10,000 micro-batches; it then begins anew."""
MAX_COMMS = 50_000
"""Collectives recorded per step: the collector refuses a batch of 100,000 records."""
_UNUSED_MAP, _USER = COMM_KINDS.index("unused_map"), COMM_KINDS.index("user")


@dataclass(slots=True)
class OpenStep:
    """A step that has not ended.

    Attributes:
        raw: What is recorded of it.
        records: Records of the backward under way.
        modules_done: Modules with gradients reduced in it.
        optimizer_ran: An optimizer was called since the last synchronisation.
        closure_ran: The last synchronisation was inside an optimizer's closure.
        closure_begins: Index of the switch to an optimizer; if its closure trains, the next step begins there.
        next_begins: First work after the last synchronisation that belongs to the next step if a nested pass follows.
        reading: Counters at the end of the synchronised backward that ends now.
        comms_switched: Collectives in it at its last switch.
        under_way: Kind and start of the time outside of the step that is under way.
        has_barrier: Training waited at a barrier in it.
        stepped_alone: An optimizer stepped in it on gradients that no rank exchanged.
        comms_computed: Collectives in it at the end of its last backward or optimizer's step.
    """

    raw: RawStep
    records: list[Any] = field(default_factory=list)
    modules_done: set[int] = field(default_factory=set)
    optimizer_ran: bool = False
    closure_ran: bool = False
    closure_begins: int | None = None
    next_begins: Position | None = None
    reading: Reading | None = None
    comms_switched: int = 0
    under_way: tuple[int, Stamp] | None = None
    has_barrier: bool = False
    stepped_alone: bool = False
    comms_computed: int = 0

    @property
    def is_full(self) -> bool:
        """Whether it holds as many switches as are kept."""
        return len(self.raw.switches) >= MAX_SWITCHES

    @property
    def has_trained(self) -> bool:
        """Whether gradients were reduced, or an optimizer stepped without a reduction."""
        return bool(self.raw.segments) or self.stepped_alone

    @property
    def is_over(self) -> bool:
        """Whether gradients were reduced and the optimizer has used them."""
        return self.has_trained and self.optimizer_ran

    def is_done(self, module: int) -> bool:
        """Whether a forward of that module begins the next step."""
        return self.has_trained and (self.optimizer_ran or module in self.modules_done)

    def empty(self) -> None:
        """Drop its switches and collectives, of which there are too many."""
        self.raw.switches, self.raw.comms, self.raw.holes, self.next_begins = [], [], [], None
        self.comms_computed = 0

    def switch(self, phase: int, stamp: Stamp) -> None:
        """Begin a phase."""
        self.raw.switches.append((phase, stamp))
        self.comms_switched = len(self.raw.comms)

    def data_gap(self) -> Position | None:
        """Make the time since the last switch a data phase; return its position, None in any phase but `other`."""
        if not self.raw.switches:
            return None
        phase, since = self.raw.switches[-1]
        if phase != OTHER:
            return None
        self.raw.switches[-1] = (DATA, since)
        return Position(len(self.raw.switches) - 1, self.comms_switched, self.raw.size, self.raw.micro_steps)

    def begin_outside(self, kind: int, stamp: Stamp) -> None:
        """Begin time outside of the step."""
        if not self.is_full:
            self.under_way = kind, stamp
            self.raw.cut(stamp)

    def end_outside(self, phase: int, stamp: Stamp) -> bool:
        """End the time outside of the step, if any, and go on in `phase`; return whether there was some."""
        if self.under_way is None:
            return False
        (kind, began), self.under_way = self.under_way, None
        self.raw.add_outside(kind, began, stamp)
        self.raw.switches.append((phase, stamp))
        return True

    def outside(self, evaluation_began: Stamp | None) -> tuple[bool, list[tuple[int, Stamp, Stamp]]]:
        """Whether the step has begun, and (kind, began, ended) of time outside of it; 0 is not ended.

        Args:
            evaluation_began: Start of the evaluation under way.
        """
        under_way = [] if self.under_way is None else [(*self.under_way, 0)]
        if evaluation_began is not None:
            under_way.append((EVALUATION, evaluation_began, 0))
        return len(self.raw.switches) > 1 and not under_way, self.raw.outside + under_way

    def end_segment(self, *, clean: bool, collective: int, waited: bool, in_closure: bool) -> None:
        """End the synchronisation under way at the last switch.

        Args:
            clean: Whether own time may be measured from the previous synchronisation on.
            collective: Sequence number of the synchronised backward in this process.
            waited: Whether training waited in a separate call.
            in_closure: Whether an optimizer's closure called it.
        """
        end = self.raw.switches[-1][1]
        self.raw.segments.append(Segment(end, self.records, clean, collective, waited, self.reading))
        self.records, self.reading = [], None
        self.closure_ran, self.optimizer_ran, self.next_begins = in_closure, False, None

    def end_exchange(self, module: int, *, clean: bool, collective: int) -> bool:
        """End a synchronisation by the script's own collectives since the last backward or optimizer's step.

        Args:
            module: Index of the module.
            clean: As for `end_segment`.
            collective: As for `end_segment`.

        Returns:
            False if no such collective was recorded.
        """
        waits = [comm for comm in self.raw.comms[self.comms_computed :] if comm[1] == _USER]
        if not waits:
            return False
        record = BackwardRecord(module)  # Of buckets that are not visible.
        record.last_ready = waits[0][2]
        self.raw.segments.append(Segment(waits[-1][3], [record], clean, collective, waited=True, reading=self.reading))
        self.reading, self.next_begins = None, None
        self.modules_done.add(module)
        self.comms_computed = len(self.raw.comms)
        return True

    def end(self, index: int | None, stamp: Stamp) -> OpenStep:
        """End the step at the switch of that index, or at `stamp`; return the next one, with the switches from there.

        Records of a backward under way belong to the next step.
        """
        raw = self.raw
        moved = raw.switches[index:] if index is not None else []
        first_moved = len(raw.switches) - len(moved)
        del raw.switches[first_moved:]
        holes = [hole - first_moved + 1 for hole in raw.holes if hole >= first_moved]
        raw.holes = [hole for hole in raw.holes if hole < first_moved]
        raw.end = moved[0][1] if moved else stamp
        following = RawStep(raw.number + 1, [(OTHER, raw.end), *moved], holes=holes)
        return OpenStep(following, self.records, reading=self.reading)

    def drop_trailing(self) -> None:
        """Drop collectives since the last switch. Unused maps are reported after they are done: they stay."""
        comms = self.raw.comms
        comms[self.comms_switched :] = [comm for comm in comms[self.comms_switched :] if comm[1] == _UNUSED_MAP]

"""Time in torch.compile: part of the own time and of the phases in which it ran, and of the account."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpobs import wire
from ddpobs.steps.account import Account, Recompilation, StartUp, Tail
from ddpobs.steps.compile_time import CompileTime
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summariser, Summary
from tests.support.columns import make_steps
from tests.support.recorded_steps import Training

FORWARD, OTHER = wire.PHASES.index("forward"), wire.PHASES.index("other")


class Reads:
    """Compilations that were reported since the last call."""

    def __init__(self) -> None:
        self.new: list[tuple[int, int]] | None = []

    def __call__(self) -> Sequence[tuple[int, int]] | None:
        new, self.new = self.new, None if self.new is None else []
        return new


def trained(*compiling: str, reads: Reads) -> Summary:
    """Four steps of 100 ns forward and 200 ns backward; in step 2 a compilation of 50 ns runs in these phases."""
    training = Training()
    for number in range(4):
        training.fetch(10)
        for phase in ("forward", "other"):
            if phase == "forward":
                training.forward(100)
            else:
                training.backward(200, exposed=5)
                training.journal.optimizer_began()
                training.spend(20)
                training.journal.optimizer_ended()
                training.spend(70)
            if number == 2 and phase in compiling and reads.new is not None:
                reads.new.append((training.clock.now_ns - 50, training.clock.now_ns))
    training.journal.finish()
    return Summariser(compilations=reads).summarise(RawSteps.from_steps(training.raw, training.clock))


def test_a_compilation_in_forward_is_part_of_that_steps_own_time() -> None:
    summary = trained("forward", reads=Reads())
    assert summary.steps.compile_ns.tolist() == [0, 0, 50, 0]
    assert summary.compiled_ns[FORWARD] == summary.compiled_ns.sum() == 50


def test_a_compilation_after_the_optimizer_is_part_of_the_next_steps_own_time() -> None:
    summary = trained("other", reads=Reads())
    assert summary.steps.compile_ns.tolist() == [0, 0, 0, 50]
    assert summary.compiled_ns[OTHER] == summary.compiled_ns.sum() == 50


def test_a_torch_that_reports_no_compilations_leaves_their_time_unknown() -> None:
    reads = Reads()
    reads.new = None
    summary = trained(reads=reads)
    assert summary.steps.compile_ns.tolist() == [wire.UNKNOWN] * 4
    assert not summary.compiled_ns.any()


def test_a_compilation_is_cut_at_windows_and_its_later_part_waits_for_its_steps() -> None:
    reads = Reads()
    reads.new = [(50, 250)]
    compile_time = CompileTime(reads)
    pieces = compile_time.pieces(0, 200, np.array([100]))
    assert pieces is not None
    assert (pieces.begin_ns.tolist(), pieces.end_ns.tolist(), pieces.window.tolist()) == ([50, 100], [100, 200], [0, 1])
    pieces = compile_time.pieces(200, 400, np.array([300]))
    assert pieces is not None
    assert (pieces.begin_ns.tolist(), pieces.end_ns.tolist(), pieces.window.tolist()) == ([200], [250], [0])


def test_compilations_after_the_first_steps_are_in_mid_run_in_the_account() -> None:
    account = Account(StartUp(None, 0, 0))
    numbers = np.arange(20)
    compile_ns = np.where(np.isin(numbers, [0, 15]), 40, 0)
    steps = make_steps(step=numbers, start_ns=100 * numbers, end_ns=100 * numbers + 100, compile_ns=compile_ns)
    account.add(steps, {}, np.array([0, 80, 0, 0, 0, 0]))
    early, late = Recompilation(50, "a.py:1 f", "size"), Recompilation(1500, "a.py:1 f", "size mismatch")
    known = account.at(Tail(2000), late)
    assert (known.compile_ns, known.compile_phases_ns[FORWARD], known.recompile_ns) == (80, 80, 40)
    assert (known.recompile_place, known.recompile_reason) == ("a.py:1 f", "size mismatch")
    assert account.at(Tail(2000), early).recompile_reason == ""

"""Steps of a module that DDP does not reduce: an optimizer ends them, and the script's exchanges join the ranks."""

from __future__ import annotations

from ddpobs.recording.journal import Journal
from ddpobs.steps.step_tracker import StepTracker


def exchanged(journal: Journal, module: int) -> None:
    """Record that the script's own collectives exchanged a module's gradients or parameters since the last backward."""
    journal.trained.add(module)
    journal.synchronised += 1
    journal.place.reduced = True
    journal.place.count_synchronised()
    journal.read_counters()
    journal.entries.append((StepTracker.exchanged, 0, (module,)))


def stepped_alone(journal: Journal) -> None:
    """Record that an optimizer steps on gradients that no rank exchanged."""
    journal.place.reduced = True
    journal.entries.append((StepTracker.stepped_alone, 0, ()))

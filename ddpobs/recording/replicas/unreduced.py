"""Optimizer steps on gradients that no collective reduced: each rank applies its own, and the replicas part.

A source (our reducer, or the attachment to torch's) marks the parameters whose gradient arrived outside of a
synchronised backward; the next synchronised backward clears the marks. This module looks at the marks when an optimizer
steps on a module's parameters:

| gradient | reported as |
|---|---|
| arrived since the last reduction; the module's forward was called | `unsynchronised` |
| arrived since the last reduction; the module's forward was not called | `bypassed` |
| of a parameter that required none when torch's reducer was built | `unfrozen` |
| reduced by another module, or no part of this optimizer | not at all |
| in a step in which user code moved as much data in collectives | not at all |
| of a module whose replicas user code keeps together (`exchanges.py`) | `exchanged`, with their period |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from ddpobs import wire
from ddpobs.never_raises import never_raises
from ddpobs.observers import GradientSource
from ddpobs.recording.journal import Journal
from ddpobs.recording.replicas.exchange_steps import exchanged, stepped_alone
from ddpobs.recording.replicas.exchanges import BY_HAND, Exchanges
from ddpobs.torch_seam import step_hooks
from ddpobs.torch_seam.modes import unseen
from ddpobs.wire.text import joined

_PATIENCE = 64
"""Optimizer steps after which a step on unreduced gradients is reported: until then an exchange may explain it."""
_requires_grad = attrgetter("requires_grad")
Send = Callable[[str, int, dict[str, wire.Scalar]], None]


@dataclass
class _Module:
    """A module whose gradients are followed.

    Attributes:
        index: Number of the module in this process.
        source: Its source; None once it is collected.
        frozen: `unreduced_parameters` of the source.
        synchronised: Returns whether a backward of the module was synchronised.
        compare: Samples the replicas after an exact exchange.
        optimizer_steps: Most steps that an optimizer has taken with the module's parameters.
        reported: Reasons that were found.
        waiting: Events of those that are not sent yet: their steps, details, and the optimizer's steps then.
        exchanges: What the script's own collectives do for the module.
        elements: Elements of its parameters.
        exchanged: The exchanges were reported.
    """

    index: int
    source: Callable[[], GradientSource | None]
    frozen: list[torch.nn.Parameter]
    synchronised: Callable[[], bool]
    compare: Callable[[], object]
    optimizer_steps: int = 0
    reported: set[str] = field(default_factory=set)
    waiting: list[tuple[int, dict[str, wire.Scalar], int]] = field(default_factory=list)
    exchanges: Exchanges = field(default_factory=Exchanges)
    elements: int = 0
    exchanged: bool = False


@dataclass
class _Seen:
    """State of one optimizer at its last step.

    Attributes:
        parameters: Number of its parameters.
        modules: The modules that it trains.
        steps: Its steps.
        elements: Elements that user code had moved in collectives.
        reduced: Those of all-reduces over all ranks.
        forwards: Forwards of each module, by index.
    """

    parameters: int
    modules: list[_Module]
    steps: int = 0
    elements: int = 0
    reduced: int = 0
    forwards: dict[int, int] = field(default_factory=dict)


class UnreducedGradients:
    """Reports optimizer steps on unreduced gradients, while installed.

    Args:
        journal: Counts steps and the user's collectives.
        event: Sends an event: kind, step, detail.
    """

    def __init__(self, journal: Journal, event: Send) -> None:
        self._journal, self._event = journal, event
        self._modules: list[_Module] = []
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Look at each optimizer's step."""
        self._undo.append(step_hooks.listen(self._began, self._ended))
        self._journal.waits.on_exchange = self._look_between

    def remove(self) -> None:
        """Report the modules that never synchronised, and remove the hooks."""
        while self._undo:
            self._undo.pop()()
        self._look_between()
        self._journal.waits.on_exchange = lambda: None
        for module in self._modules:
            self._send(module)
            if module.exchanges.are_regular and (module.exchanged or not module.synchronised()):
                self._send_exchanges(module)
            elif module.optimizer_steps and not module.synchronised():
                self._event(
                    "never_synchronised",
                    self._journal.number,
                    {"module": module.index, "optimizer_steps": module.optimizer_steps},
                )
        self._modules = []

    @never_raises
    def _look_between(self) -> None:
        """Look for an exchange after an optimizer's step, before the next one begins."""
        for history in self._optimizers.values():
            self._look_for_exchange(history)

    def _look_for_exchange(self, history: _Seen) -> tuple[int, bool]:
        """Return the elements that the script moved since the last look, and whether that was an exchange."""
        waits = self._journal.waits
        moved, reduced = waits.collective_elements - history.elements, waits.reduced_elements - history.reduced
        found = False
        for module in history.modules:
            if module.exchanges.look(history.steps, moved, reduced, module.elements):
                found = True
                if not module.synchronised():
                    exchanged(self._journal, module.index)
                    if module.exchanges.is_exact:
                        module.compare()
        if found or not history.modules:
            history.elements, history.reduced = waits.collective_elements, waits.reduced_elements
        return moved, found

    def _send(self, module: _Module) -> None:
        """Send the waiting events, unless the script keeps the replicas together by itself."""
        waiting, module.waiting = module.waiting, []
        for step, detail, _ in waiting:
            if module.exchanges.are_regular and detail["reason"] != "unfrozen":
                module.exchanged = True
            else:
                self._event("not_reduced", step, detail)

    def _send_exchanges(self, module: _Module) -> None:
        module.exchanged = True
        facts = {"module": module.index, "optimizer_steps": module.optimizer_steps, **module.exchanges.facts()}
        self._event("exchanged", self._journal.number, facts)

    @unseen
    def follow(
        self,
        index: int,
        source: GradientSource,
        synchronised: Callable[[], bool],
        compare: Callable[[], object] = lambda: None,
    ) -> None:
        """Follow a module's gradients, until its source is collected."""
        frozen = [parameter for _, parameter in source.unreduced_parameters]
        self._modules = [module for module in self._modules if self._is_needed(module)]
        elements = sum(parameter.numel() for parameter in source.parameters)
        self._modules.append(_Module(index, weakref.ref(source), frozen, synchronised, compare, elements=elements))
        for history in self._optimizers.values():
            history.parameters = -1  # Its modules are looked up anew.

    @staticmethod
    def _is_needed(module: _Module) -> bool:
        return module.source() is not None or (module.optimizer_steps > 0 and not module.synchronised())

    # ------------------------------------------------------------------ an optimizer's step

    @never_raises
    def _began(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _has_closure(args, kwargs):
            self._look(optimizer)

    @never_raises
    def _ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _has_closure(args, kwargs):  # The closure ran the backward whose gradients the step used.
            self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        journal = self._journal
        if journal.thread.paused or not self._modules:
            return
        history = self._seen(optimizer)
        moved, found = self._look_for_exchange(history)
        history.elements, history.reduced = journal.waits.collective_elements, journal.waits.reduced_elements
        history.steps += 1
        for module in history.modules:
            module.optimizer_steps = max(module.optimizer_steps, history.steps)
            source = module.source()
            if source is None:
                continue
            has_forward = source.forwards != history.forwards.get(module.index, 0)
            history.forwards[module.index] = source.forwards
            if source.has_local_gradients():
                self._judge(optimizer, module, source, "unsynchronised" if has_forward else "bypassed", moved)
                if not (found or module.synchronised()):
                    stepped_alone(journal)
            if module.frozen and any(map(_requires_grad, module.frozen)):
                self._judge(optimizer, module, source, "unfrozen", moved)
            if module.waiting:
                self._wait(module)

    def _wait(self, module: _Module) -> None:
        """Send what waits once the exchanges explain it, or have not for long enough."""
        patient = module.optimizer_steps - module.waiting[0][2] < _PATIENCE
        if module.exchanges.are_regular:
            self._send(module)
            self._send_exchanges(module)
        elif not patient:
            self._send(module)

    def _seen(self, optimizer: Optimizer) -> _Seen:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        history = self._optimizers.get(optimizer)
        if history is None or history.parameters != count:
            own = _ids(optimizer)
            modules = [module for module in self._modules if not own.isdisjoint(_ids_of_module(module))]
            earlier = (
                (history.steps, history.elements, history.reduced, history.forwards) if history is not None else ()
            )
            history = self._optimizers[optimizer] = _Seen(count, modules, *earlier)
        return history

    @unseen
    def _judge(self, optimizer: Optimizer, module: _Module, source: GradientSource, reason: str, moved: int) -> None:
        """Report a step, unless the gradients were reduced otherwise."""
        if reason in module.reported:
            return
        own = _ids(optimizer) - self._reduced_elsewhere(module)
        if reason == "unfrozen":
            suspects = [(name, p) for name, p in source.unreduced_parameters if p.requires_grad]
        else:
            suspects = [(source.names[index], source.parameters[index]) for index in source.local_gradients()]
        local = [(name, p) for name, p in suspects if p.grad is not None and id(p) in own]
        if not local or moved >= BY_HAND * sum(parameter.numel() for _, parameter in local):
            return
        module.reported.add(reason)
        names = [name for name, _ in local]
        detail: dict[str, wire.Scalar] = {
            "reason": reason,
            "parameters": joined(names),
            "count": len(names),
            "module": module.index,
            "optimizer_steps": module.optimizer_steps,
        }
        module.waiting.append((self._journal.number, detail, module.optimizer_steps))

    def _reduced_elsewhere(self, module: _Module) -> set[int]:
        """Ids of parameters that another module reduced, as a shared layer's."""
        reduced: set[int] = set()
        for other in self._modules:
            source = other.source()
            if other is not module and source is not None and other.synchronised():
                local = set(source.local_gradients())
                reduced |= {id(p) for index, p in enumerate(source.parameters) if index not in local}
        return reduced


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the step computes its own gradients; the first argument is the optimizer."""
    return kwargs.get("closure") is not None or (len(args) > 1 and callable(args[1]))


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _ids_of_module(module: _Module) -> set[int]:
    source = module.source()
    return set() if source is None else {*map(id, source.parameters), *map(id, module.frozen)}

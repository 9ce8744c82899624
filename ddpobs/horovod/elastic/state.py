"""State of an elastic training: what a commit keeps, and what every rank gets from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from queue import SimpleQueue
from typing import Any

import torch
from typing_extensions import override

from ddpobs.errors import HostsUpdatedInterrupt
from ddpobs.horovod.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from ddpobs.horovod.elastic.commit_file import CommitFile
from ddpobs.horovod.elastic.sampler import ElasticSampler
from ddpobs.horovod.position import rank

_REMOVED = 1
"""Horovod's code for hosts that were removed, while none was added."""


class State:
    """Base class: `save`, `restore` and `sync` are the subclass's.

    Args:
        bcast_object: Returns rank 0's object on every rank.
        get_rank: Returns this rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: SimpleQueue[tuple[float, int]] = SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0  # Those of earlier attempts included.

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these functions after the ranks were connected anew, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks were connected anew: call the registered functions."""
        self._host_messages = SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Hosts have changed: `check_host_updates` will raise. torchrun restarts the ranks instead of calling this.

        Args:
            timestamp: Time of the change; only changes after the last one count, and only rank 0's.
            update_res: 1 if hosts were only removed, as in Horovod.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, for this process and for the next attempt, and check the hosts.

        Raises:
            HostsUpdatedInterrupt: As `check_host_updates`.
        """
        self.save()
        self._commits += 1
        if (file := CommitFile.of_this_host()) is not None and (saved := self._export()) is not None:
            file.write(self._commits, saved)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether rank 0 was notified of other hosts; every rank must call this.

        Raises:
            HostsUpdatedInterrupt: On every rank, if it was.
        """
        latest, results = self._last_updated_timestamp, set()
        while not self._host_messages.empty():
            timestamp, update_res = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                latest = max(latest, timestamp)
                results.add(update_res)
        before = self._last_updated_timestamp
        self._last_updated_timestamp, only_removed = self._bcast_object((latest, results == {_REMOVED}))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(only_removed)

    def _export(self) -> Any:
        """Return the last commit, which can be pickled; None if the class has none that the next attempt can load."""
        return None

    def _load(self, saved: Any) -> None:
        """Take the commit of an earlier attempt, which `_export` has returned, as the last commit."""

    def save(self) -> None:
        """Keep the present state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state of the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks were connected anew, before the registered functions are called."""


class ObjectState(State):
    """State of objects that can be pickled: each keyword is an attribute.

    Args:
        bcast_object: Returns rank 0's object on every rank.
        get_rank: Returns this rank.
        **kwargs: The attributes and their first values. An object that changes in place is not copied.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    @override
    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    @override
    def restore(self) -> None:
        self._set_attributes()

    @override
    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            self._set_attributes()

    @override
    def _export(self) -> Any:
        return self._saved_state

    @override
    def _load(self, saved: Any) -> None:
        self._saved_state = saved
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """State of a training with torch: models, optimizers, schedulers, samplers, and objects that can be pickled.

    Args:
        model: A model, as the attribute `model`.
        optimizer: An optimizer, as the attribute `optimizer`.
        **kwargs: Further attributes, several models and optimizers among them.
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = kwargs | {"model": model, "optimizer": optimizer}
        handlers = {name: handler for name, value in values.items() if (handler := _handler_of(value)) is not None}
        self.__dict__["_handlers"] = handlers
        for name, handler in handlers.items():
            self.__dict__[name] = handler.value
        objects = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **objects)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    @override
    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    @override
    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    @override
    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        self.save()

    @override
    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    @override
    def _export(self) -> Any:
        return super()._export(), {name: handler.saved for name, handler in self._handlers.items()}

    @override
    def _load(self, saved: Any) -> None:
        objects, by_name = saved
        for name, handler in self._handlers.items():
            handler.saved = by_name[name]
            handler.restore()
        super()._load(objects)


class StateHandler:
    """Saves, restores and synchronizes an attribute of a TorchState by its `state_dict`.

    Args:
        value: The attribute's value.

    Attributes:
        value: The attribute's value.
        saved: A copy of its state.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of the value's state."""
        self.saved = deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the copy."""
        self.value.load_state_dict(deepcopy(self.saved))  # An optimizer would go on with the copy's own tensors.

    def sync(self) -> None:
        """Take over rank 0's state."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        """The ranks were connected anew."""

    def set_value(self, value: Any) -> None:
        """Another value has taken the attribute's place."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handles a model."""

    @override
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handles an optimizer, a DistributedOptimizer too."""

    @override
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Handles an ElasticSampler."""

    @override
    def reset(self) -> None:
        self.value.reset()


_handlers: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The types of attributes that have a handler, each with its handler; the first that fits counts."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers, for the states that are created from now on."""
    _handlers[:] = registry


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _handlers if isinstance(value, kind)), None)

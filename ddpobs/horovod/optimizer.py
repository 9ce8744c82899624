"""`DistributedOptimizer`: the user's optimizer, with gradients that are reduced during backward."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
import torch.distributed as dist

from ddpobs.comm import name_of
from ddpobs.config import TelemetryConfig, resolve
from ddpobs.errors import HorovodError, StepOrderError
from ddpobs.horovod import agreement
from ddpobs.horovod.broadcast import allgather_object
from ddpobs.horovod.calls import Call
from ddpobs.horovod.compression import Compression, Compressor, factory_of
from ddpobs.horovod.environment import with_stall_check
from ddpobs.horovod.failures import failures_as_internal_errors
from ddpobs.horovod.forwards import Model, watch
from ddpobs.horovod.operations import Average, sum_or_average
from ddpobs.horovod.optimizer_arguments import (
    check,
    factors,
    frozen_parameters,
    fusion_threshold,
    get_own_group,
    group_indices,
    trained_parameters,
)
from ddpobs.horovod.process import ProcessSet, global_process_set
from ddpobs.horovod.reduction import OptimizerReducer
from ddpobs.never_raises import goes_on_without
from ddpobs.observers import ModuleObserver
from ddpobs.reducer import model_check
from ddpobs.reducer.settings import Settings
from ddpobs.torch_seam.patching import skip_in_dynamo

_FIRST_BUCKET = 2**20
reducers: WeakKeyDictionary[OptimizerReducer, int] = WeakKeyDictionary()
"""Each reducer with the index of its side group."""
_wrappers: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Each DistributedOptimizer by the order of its construction, which is the same on all ranks."""
_numbers = count()

_NOT_REDUCED = (
    "their gradients would not be reduced. Unfreeze the parameters, then wrap their optimizer in a DistributedOptimizer"
)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    telemetry: bool | str | TelemetryConfig | None = None,
) -> Any:
    """Create an optimizer of the same class and settings that steps on gradients reduced over the ranks.

    Args:
        optimizer: An optimizer of the same parameters on every rank. The caller must not use it afterwards.
        named_parameters: Names for messages and telemetry. Every parameter that requires a gradient must be included.
        compression: The form in which a gradient travels.
        backward_passes_per_step: Backward passes whose gradients accumulate before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: With Average, the divisor before the sum; the rest of the division follows the sum.
        num_groups: Number of groups in which the parameters are reduced.
        groups: Number of groups, or the parameters of each group; the parameters of a group travel together.
        sparse_as_dense: No effect: sparse gradients always travel dense, and are sparse again after the reduction.
        process_set: The ranks that take part.
        telemetry: As in `ddpobs.DistributedDataParallel`.

    Raises:
        HorovodError: The arguments contradict each other or the optimizer.
        ModelsDifferError: On every rank, if the ranks' parameters or arguments differ.
    """
    skip_in_dynamo()
    if isinstance(optimizer, _Distributed):
        raise HorovodError("this optimizer is a DistributedOptimizer already: wrap the original optimizer")
    check(optimizer, compression, backward_passes_per_step)
    named_parameters = None if named_parameters is None else list(named_parameters)
    trained_parameters(optimizer, named_parameters)
    op = sum_or_average(op, "DistributedOptimizer")
    factors(op, gradient_predivide_factor, process_set.size())
    kind: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    wrapper = kind(optimizer.param_groups)
    wrapper.defaults, wrapper.state = optimizer.defaults, optimizer.state
    for attribute, hooks in vars(optimizer).items():
        if attribute.startswith("_optimizer_") and attribute.endswith("_hooks"):  # The same tables: handles stay valid.
            setattr(wrapper, attribute, hooks)
    wrapper._connect = partial(
        _connect,
        named_parameters=named_parameters,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups or None,
        process_set=process_set,
        telemetry=telemetry,
    )
    wrapper._connect(wrapper, passes=backward_passes_per_step)
    _wrappers[next(_numbers)] = wrapper
    return wrapper


def _connect(
    wrapper: Any,
    *,
    passes: int,
    named_parameters: list[tuple[str, torch.nn.Parameter]] | None,
    compression: type[Compressor] | Compressor,
    op: str,
    gradient_predivide_factor: float,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None,
    process_set: ProcessSet,
    telemetry: bool | str | TelemetryConfig | None,
) -> None:
    """Give the optimizer a reducer over the set's process group.

    Raises:
        ModelsDifferError: On every rank, if the ranks' parameters or arguments differ.
    """
    wrapper._passes = passes
    parameters, names = trained_parameters(wrapper, named_parameters)
    wrapper._parameter_names = dict(zip(parameters, names, strict=True))
    frozen = frozen_parameters(wrapper, named_parameters)
    if not process_set.included():
        return
    call = Call("DistributedOptimizer", settings=(("has parameters to train", bool(parameters)),))
    agreement.of(process_set).check(call, always=True)
    if not parameters:
        wrapper._frozen = [parameter for _, parameter, _ in frozen]
        return
    pre_divisor, post_factor = factors(op, gradient_predivide_factor, process_set.size())
    group = process_set.group
    dense = [False] * len(parameters)
    fused = group_indices(groups, parameters)
    settings = {
        "compression": name_of(compression),
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "backward_passes_per_step": passes,
        "groups": fused,
    }
    facts = {
        model_check.SETTINGS: [(name, str(value)) for name, value in settings.items()],
        "parameters": model_check.parameters(names, parameters, dense),
    }
    device = parameters[0].device
    limit, index = model_check.check_same_everywhere(facts, (fusion_threshold(), _free_index()), group, device)
    recorder = None
    config = resolve(telemetry, os.environ)
    if config is not None:
        wrapper._model = Model(parameters)
        recorder = wrapper._recorder = _observe(wrapper, group, with_stall_check(config, os.environ), passes)
    wrapper._reducer = OptimizerReducer(
        parameters,
        names,
        dense,
        group=get_own_group(group, device, index),
        comm_factory=factory_of(compression),
        settings=Settings(
            first_limits_bytes=[min(_FIRST_BUCKET, limit), limit],
            rebuilt_limits_bytes=[min(_FIRST_BUCKET, limit), limit],
        ),
        recorder=recorder,
        passes=passes,
        pre_divisor=pre_divisor,
        post_factor=post_factor,
        groups=fused,
        frozen=frozen,
    )
    if recorder is not None:
        recorder.compare_replicas(wrapper._reducer.parameters, wrapper._reducer.names)
    reducers[wrapper._reducer] = index
    wrapper._release = finalize(wrapper, wrapper._reducer.remove_hooks)  # The model may get another optimizer.
    wrapper._release.atexit = False


def disconnect_all() -> list[tuple[int, Any]]:
    """Take the reducers from all DistributedOptimizers, so that their process groups can be destroyed.

    Gradients that are not reduced yet are lost.

    Returns:
        The optimizers and their numbers, for `connect_all`.
    """
    wrappers = sorted(_wrappers.items())
    for _, wrapper in wrappers:
        wrapper._disconnect()
    return wrappers


def connect_all(wrappers: list[tuple[int, Any]]) -> None:
    """Give the optimizers new reducers, after the ranks were connected anew; every rank must call this.

    Optimizers are garbage-collected at different times on different ranks: those that all ranks still have count.
    """
    by_number = dict(wrappers)
    common = set.intersection(*allgather_object(set(by_number)))
    for number in sorted(common):
        by_number[number]._connect(by_number[number], passes=by_number[number]._passes)


class _Distributed(torch.optim.Optimizer):
    """The attributes that a DistributedOptimizer adds to the optimizer's own class."""

    _reducer: OptimizerReducer | None = None
    _connect: Callable[..., None]
    _release: Callable[[], Any]
    _parameter_names: Mapping[torch.nn.Parameter, str]
    """By trained parameter; scripts read Horovod's under this name."""
    _passes = 1
    _recorder: ModuleObserver | None = None
    _frozen: Sequence[torch.nn.Parameter] = ()
    _synchronized = False
    _should_synchronize = True

    def synchronize(self) -> None:
        """Reduce the gradients that are not reduced yet, and wait for all of them.

        Parameters that were frozen at construction are reduced once they require gradients.

        Raises:
            HorovodError: All parameters were frozen at construction, and one is not any more.
            HorovodInternalError: The exchange with the other ranks failed.
            ModelsDifferError: Parameters started to require gradients on some ranks only.
        """
        if self._reducer is None:
            self._check_frozen()
        else:
            with failures_as_internal_errors():
                self._reducer.synchronize()
            self._reducer.sparse_again()
        self._synchronized = True

    def _check_frozen(self) -> None:
        if any(parameter.requires_grad for parameter in self._frozen):
            raise HorovodError(
                "all of the optimizer's parameters were frozen when DistributedOptimizer was created: " + _NOT_REDUCED
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which only the optimizer's own constructor may do.

        Raises:
            HorovodError: The reducer exists, and its parameters are fixed.
        """
        if self._reducer is not None:
            raise HorovodError(f"add_param_group() after DistributedOptimizer was created: {_NOT_REDUCED}")
        super().add_param_group(param_group)

    def _disconnect(self) -> None:
        self._synchronized = False
        if self._reducer is not None:
            self._release()
            self._reducer = None
        if self._recorder is not None:
            from ddpobs import telemetry

            telemetry.forget(self._recorder)
            self._recorder = None

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` skip the synchronisation, after an explicit `synchronize` (to clip gradients, for example)."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients over this many backward passes from now on."""
        self._passes = passes
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise and step. A closure's gradients are reduced after each of its calls.

        Horovod reduces only before the closure, so that each rank steps on its own gradients.
        """
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are reduced twice. Call it inside of `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            if closure is None:
                self.synchronize()
            else:
                closure = self._synchronise_after(closure)
        self._synchronized = False
        return super().step(closure)

    def _synchronise_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronising() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return synchronising

    step.hooked = True  # type: ignore[attr-defined]  # Else torch would run step hooks here and in the optimizer's own step.

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Clear the gradients, as the optimizer does.

        Raises:
            StepOrderError: Some gradients are not synchronised yet.
        """
        if self._reducer is not None and self._reducer.under_way:
            raise StepOrderError(
                "zero_grad() between backward() and step() or synchronize() would clear gradients that are not "
                "reduced yet"
            )
        return super().zero_grad(*args, **kwargs)


def _free_index() -> int:
    """The first side-group index that no optimizer uses.

    All ranks take rank 0's index, because optimizers are garbage-collected at different times on different ranks.
    """
    used = set(reducers.values())
    return next(index for index in count() if index not in used)


@goes_on_without
def _observe(optimizer: Any, group: dist.ProcessGroup, config: TelemetryConfig, passes: int) -> ModuleObserver | None:
    from ddpobs import telemetry

    settings: dict[str, str | int] = {"reducer": "ddpobs.horovod", "backward_passes_per_step": passes}
    recorder = telemetry.join(optimizer._model, config, group, settings, name=type(optimizer).__name__)
    if recorder is not None:
        finalize(optimizer, telemetry.forget, recorder).atexit = False
        watch(optimizer._model, recorder)
    return recorder

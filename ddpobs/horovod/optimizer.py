"""`DistributedOptimizer`: the user's optimizer, whose gradients are reduced while backward goes on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpobs.comm import name_of
from ddpobs.comm.side_groups import group_beside
from ddpobs.config import TelemetryConfig, resolve
from ddpobs.errors import HorovodError, StepOrderError
from ddpobs.horovod.collectives import Average, Sum, check_op
from ddpobs.horovod.compression import Compression, Compressor, way_of
from ddpobs.horovod.forwards import Model, watch
from ddpobs.horovod.process import ProcessSet, global_process_set, rank, size
from ddpobs.horovod.reduction import OptimizerReducer
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.reducer import model_check
from ddpobs.reducer.settings import Settings
from ddpobs.torch_seam.patching import skip_in_dynamo

_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20
_reducers: WeakKeyDictionary[OptimizerReducer, int] = WeakKeyDictionary()
"""Each with the place among the process groups beside its ranks' own that it reduces over."""
_joins = count()
_NOT_REDUCED = "nobody would reduce their gradients. Wrap an optimizer that has them, unfrozen, in another one"


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
    """An optimizer of the given one's class and settings that steps on gradients reduced over the ranks.

    Args:
        optimizer: Over the same parameters on every rank. It is not to be used itself any more.
        named_parameters: Names for them, for messages and telemetry; those that require a gradient must all be there.
        compression: What travels in the place of a gradient.
        backward_passes_per_step: Backward passes whose gradients add up before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: With Average, what gradients are divided by before the sum; the rest of the
            division comes after it.
        num_groups: Reduce the parameters in so many groups.
        groups: How many groups, or which parameters are in each; those of one group travel together.
        sparse_as_dense: Leave gradients dense that came sparse. They travel dense either way.
        process_set: Who takes part.
        telemetry: As `ddpobs.DistributedDataParallel`'s.

    Raises:
        HorovodError: Arguments that contradict each other or the optimizer.
        ModelsDifferError: On every rank, where the ranks' parameters or arguments differ.
    """
    skip_in_dynamo()
    _check(optimizer, compression, backward_passes_per_step)
    parameters, names = _named(optimizer, named_parameters)
    before, after = _factors(check_op(op), gradient_predivide_factor, process_set.size())
    kind: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    made = kind(optimizer.param_groups)
    made.defaults, made.state = optimizer.defaults, optimizer.state
    made._sparse_as_dense = sparse_as_dense
    made._frozen = [p for group in made.param_groups for p in group["params"] if not p.requires_grad]
    if not process_set.included() or not parameters:
        return made
    group = process_set.group
    dense = [False] * len(parameters)
    fused = _numbers(groups if groups is not None else num_groups or None, parameters)
    settings = {
        "compression": name_of(compression),
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "backward_passes_per_step": backward_passes_per_step,
        "groups": fused,
    }
    facts = {
        model_check.SETTINGS: [(name, str(value)) for name, value in settings.items()],
        "parameters": model_check.parameters(names, parameters, dense),
    }
    device = parameters[0].device
    limit, place = model_check.check_same_everywhere(facts, (_fusion_threshold(), _free_place()), group, device)
    recorder = None
    config = resolve(telemetry, os.environ)
    if config is not None:
        made._model = Model(parameters)
        recorder = _observe(made, group, config, backward_passes_per_step)
    made._reducer = OptimizerReducer(
        parameters,
        names,
        dense,
        group=_group_of_its_own(group, device, place),
        strategy=way_of(compression),
        settings=Settings(
            first_limits_bytes=[min(_FIRST_BUCKET, limit), limit],
            rebuilt_limits_bytes=[min(_FIRST_BUCKET, limit), limit],
        ),
        recorder=recorder,
        passes=backward_passes_per_step,
        predivisor=before,
        postfactor=after,
        groups=fused,
    )
    _reducers[made._reducer] = place
    finalize(made, made._reducer.remove_hooks).atexit = False  # The model may be given another optimizer.
    return made


class _Distributed(torch.optim.Optimizer):
    """What a DistributedOptimizer has beyond the optimizer's own class."""

    _reducer: OptimizerReducer | None = None
    _sparse_as_dense = False
    _frozen: Sequence[torch.Tensor] = ()
    _synchronized = False
    _should_synchronize = True

    def synchronize(self) -> None:
        """Reduce what is not reduced yet and wait for all of it.

        Raises:
            HorovodError: A parameter trains that was frozen when this was made.
        """
        if self._reducer is not None:
            self._check_frozen()
            self._reducer.synchronize()
            if not self._sparse_as_dense:
                self._reducer.sparse_again()
        self._synchronized = True

    def _check_frozen(self) -> None:
        trained = [list(p.shape) for p in self._frozen if p.requires_grad]
        if trained:
            raise HorovodError(
                f"{len(trained)} of the optimizer's parameters were frozen when DistributedOptimizer was made and are "
                f"not now, the first of shape {trained[0]}: {_NOT_REDUCED}"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's, while it is made.

        Raises:
            HorovodError: It is made: whose gradients are reduced is decided.
        """
        if self._reducer is not None:
            raise HorovodError(f"add_param_group() after DistributedOptimizer was made: {_NOT_REDUCED}")
        super().add_param_group(param_group)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have `step` not synchronise: for after a `synchronize` of one's own, to clip gradients say."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Have gradients add up over so many backward passes from now on."""
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise and let the optimizer step; what a closure's backward leaves is reduced after each of its calls.

        Horovod's reduces only before, so that each rank steps by gradients of its own.
        """
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "step() after synchronize() synchronises once more: put it into `with "
                    "optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            if closure is None:
                self.synchronize()
            else:
                closure = self._synchronising(closure)
        self._synchronized = False
        return super().step(closure)

    def _synchronising(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronising() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return synchronising

    step.hooked = True  # type: ignore[attr-defined]  # Or torch would run step hooks here and in the optimizer's own.

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's.

        Raises:
            StepOrderError: Gradients are on their way.
        """
        if self._reducer is not None and self._reducer.under_way:
            raise StepOrderError(
                "zero_grad() between backward() and step() or synchronize() would clear gradients on their way"
            )
        return super().zero_grad(*args, **kwargs)


def join(device: int = -1) -> int:
    """Say that this rank has no data left: it takes part in the others' synchronisations with zeros until all say so.

    Meanwhile the others may use the one DistributedOptimizer there is and no other collective. Its Average still
    divides by all ranks.

    Args:
        device: Not needed.

    Returns:
        The rank that joined last, the highest of several.

    Raises:
        HorovodError: There is not exactly one DistributedOptimizer.
    """
    number = next(_joins)
    if size() == 1:
        return 0
    if len(_reducers) != 1:
        raise HorovodError(f"join() works with exactly one DistributedOptimizer, and there are {len(_reducers)}")
    (reducer,) = _reducers
    store = PrefixStore(f"ddpobs/join/{number}", dist.distributed_c10d._get_default_store())
    store.set(str(rank()), str(reducer.synchronised))
    everyone = [str(other) for other in range(size())]
    while True:
        reducer.participate_with_zeros()
        # Whoever joined before this synchronisation has said so before it began, so that all ranks find the same.
        if not store.check(everyone):
            continue
        joined = [int(store.get(other)) for other in everyone]
        if max(joined) < reducer.synchronised:
            return max(place for place, at in enumerate(joined) if at == max(joined))


def _check(optimizer: object, compression: object, passes: Any) -> None:
    """Have what would fail in mid-training, or in words that say nothing of it, fail here."""
    if isinstance(optimizer, _Distributed):
        raise HorovodError("this optimizer is a DistributedOptimizer already: wrap the one that it was made of")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise HorovodError(f"optimizer: expected one of torch's, got {type(optimizer).__name__}")
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise HorovodError(
            "compression: expected Compression.none, Compression.fp16 or an object with compress and decompress, "
            f"got {compression!r}"
        )
    if not hasattr(passes, "__index__") or passes < 1:  # NumPy's too.
        raise HorovodError(f"backward_passes_per_step: expected a whole number, at least 1, got {passes!r}")


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> tuple[list[torch.nn.Parameter], list[str]]:
    """The optimizer's parameters that require gradients, and their names."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if named_parameters is None:
        return parameters, [f"parameter.{place}" for place in range(len(parameters))]
    given = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in given):
        raise HorovodError("named_parameters: expected (name, parameter) pairs, as model.named_parameters() gives them")
    names = [name for name, _ in given]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise HorovodError(f"named_parameters: these names come more than once: {', '.join(twice)}")
    name_of = {id(parameter): name for name, parameter in given}
    unnamed = [place for place, parameter in enumerate(parameters) if id(parameter) not in name_of]
    if unnamed:
        raise HorovodError(
            f"named_parameters: {len(unnamed)} of the optimizer's {len(parameters)} parameters have no name in it"
        )
    return parameters, [name_of[id(parameter)] for parameter in parameters]


def _numbers(
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None, parameters: Sequence[torch.nn.Parameter]
) -> list[list[int]] | None:
    """The groups by the parameters' numbers."""
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups < 1:
            raise HorovodError(f"groups: expected at least 1, got {groups}")
        each = -(-len(parameters) // groups)
        return [list(range(len(parameters)))[begin : begin + each] for begin in range(0, len(parameters), each)]
    number = {id(parameter): place for place, parameter in enumerate(parameters)}
    listed = isinstance(groups, Sequence) and not isinstance(groups, str)
    if not listed or not all(isinstance(p, torch.Tensor) for group in groups for p in group):
        raise HorovodError(f"groups: expected a number, or lists of parameters, got {groups!r}")
    numbered = [[number[id(p)] for p in group if id(p) in number] for group in groups]
    flat = [place for group in numbered for place in group]
    if len(set(flat)) < len(flat):
        raise HorovodError("groups: a parameter may be in one group only")
    return [group for group in numbered if group]


def _factors(op: str, predivide: float, ranks: int) -> tuple[float | None, float | None]:
    """What gradients are divided by before the sum over the ranks, and what the sum is multiplied by."""
    if op not in (Average, Sum):
        raise HorovodError(f"DistributedOptimizer: expected op Average or Sum, got {op}")
    if not predivide > 0:
        raise HorovodError(f"gradient_predivide_factor: expected a number above 0, got {predivide}")
    if predivide == 1.0:
        return (float(ranks) if op == Average else None), None
    if op != Average:
        raise HorovodError("gradient_predivide_factor is only for op=Average")
    return predivide, predivide / ranks


def _free_place() -> int:
    """The first one that no optimizer has; rank 0's counts, as optimizers are collected at different times."""
    taken = set(_reducers.values())
    return next(place for place in count() if place not in taken)


def _group_of_its_own(group: dist.ProcessGroup, device: torch.device, place: int) -> dist.ProcessGroup:
    """For one optimizer's gradients alone.

    Where a rank leaves parameters out their bucket waits for `synchronize`, while it is under way on other ranks. Over
    one process group it would meet what the script calls between the two: a metric's mean, another optimizer's.
    """
    return group if group.size() == 1 else group_beside(group, device, -1 - place)


def _fusion_threshold() -> int:
    """Most bytes of a bucket: HOROVOD_FUSION_THRESHOLD, or DDP's; Horovod's 128 MB would overlap with nothing."""
    given = os.environ.get("HOROVOD_FUSION_THRESHOLD")
    if given is None:
        return _BUCKET
    if not given.isdigit():
        raise HorovodError(f"HOROVOD_FUSION_THRESHOLD: expected a number of bytes, got {given!r}")
    return int(given)


def _observe(optimizer: Any, group: dist.ProcessGroup, config: TelemetryConfig, passes: int) -> ModuleRecorder:
    from ddpobs import telemetry

    settings: dict[str, str | int] = {"reducer": "ddpobs.horovod", "backward_passes_per_step": passes}
    recorder = telemetry.join(optimizer._model, config, group, settings, name=type(optimizer).__name__)
    finalize(optimizer, telemetry.forget, recorder).atexit = False
    watch(optimizer._model, recorder)
    return recorder

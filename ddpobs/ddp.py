"""`DistributedDataParallel`: torch's module with the reducer of this package."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn import parallel
from torch.nn.parallel.distributed import _find_tensors

from ddpobs.comm import CommFactory, choose, name_of
from ddpobs.config import TelemetryConfig, resolve
from ddpobs.errors import ConfigError, DataParallelError
from ddpobs.never_raises import goes_on_without
from ddpobs.reducer import model_check, pipeline_steps
from ddpobs.reducer.ddp_logger import Logger
from ddpobs.reducer.dropped_layers import DropPlan
from ddpobs.reducer.late_parameters import Frozen
from ddpobs.reducer.settings import Settings
from ddpobs.reducer.torch_members import TorchReducer
from ddpobs.torch_seam.bucket_caps import BucketCaps
from ddpobs.torch_seam.patching import skip_in_dynamo

if TYPE_CHECKING:
    from ddpobs.observers import ModuleObserver

_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}
_ARGUMENTS = inspect.signature(parallel.DistributedDataParallel.__init__)


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with a reducer in Python that records the time of each step.

    It takes every argument of torch's class, and is an instance of it. Only the gradient reduction is replaced: torch
    builds its C++ reducer in `_ddp_init_helper`, and this class builds its own there.

    Args:
        module: The module to train.
        *args: Torch's.
        telemetry: None (use `DDPOBS_TELEMETRY`), False, True, a collector's address, or settings. Switched off it costs
            nothing and starts no thread.
        comm: Communication strategy of full buckets: None for the plain all-reduce, a name (`"fp16"`, `"topk:0.01"`),
            or a callable that takes the process group and returns a `ddpobs.comm.BucketComm`.
            docs/communication.md lists the names, and the cost of each strategy.
        round_robin_groups: Number of process groups over which buckets are distributed in turn.
        **kwargs: Torch's. `bucket_cap_mb="auto"` tries the buckets that the first steps predict to be best, and keeps
            them where they prove to be faster; it needs the plain all-reduce.

    Raises:
        ConfigError: A telemetry setting, `bucket_cap_mb`, `comm`, `round_robin_groups` or
            `torch._dynamo.config.optimize_ddp` has an invalid value, or one that "auto" or a `LayerDrop` excludes.
        DataParallelError: The module is a `torch.nn.DataParallel`.
        ModelsDifferError: The ranks' parameters, buffers or flags differ. Raised on every rank.
        UnusedParametersError: A parameter got no gradient on some rank, and `find_unused_parameters` is off. Raised by
            backward, on every rank.
    """

    # Torch declares its C++ classes here. If the reduction of every parameter is delayed, there is no reducer.
    reducer: Any = None
    logger: Any

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        telemetry: bool | str | TelemetryConfig | None = None,
        comm: str | CommFactory | None = None,
        round_robin_groups: int = 1,
        **kwargs: Any,
    ) -> None:
        skip_in_dynamo()
        _refuse_compiled_reducer()
        if isinstance(module, torch.nn.DataParallel):
            raise DataParallelError
        self._telemetry_config = resolve(telemetry, os.environ)
        self._comm_factory = choose(comm, round_robin_groups)
        self._recorder: ModuleObserver | None = None
        bound = _ARGUMENTS.bind(self, module, *args, **kwargs)
        self._arguments: dict[str, Any] | None = {
            **bound.arguments,
            "comm": comm,
            "round_robin_groups": round_robin_groups,
        }
        self._tunes_buckets = _tunes_buckets(self._arguments)
        if self._tunes_buckets:
            bound.arguments["bucket_cap_mb"] = None
        super().__init__(*bound.args[1:], **bound.kwargs)
        self._arguments = None  # A copy is not compared between the ranks: a single rank may make it.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and watch its outputs: their gradients mark the start of a backward."""
        if self._recorder is not None:
            self._recorder.forward_began(inputs, kwargs)
            if self._recorder.waits_for_forward and not self._check_sync_bufs_pre_fwd():
                self._recorder.replicas_ready()
        # A forward without gradients may run between another forward and its backward, and must not affect them.
        trains = torch.is_grad_enabled() and self.reducer is not None
        if trains:
            self.reducer.prepare(self.require_backward_grad_sync)
        elif self.reducer is not None:  # It broadcasts buffers too, and other ranks may still wait in that backward.
            self.reducer.end_interrupted()
        try:
            output = super().forward(*inputs, **kwargs)
        except BaseException:
            if trains:
                self.reducer.forward_failed()
            raise
        if trains and self.require_backward_grad_sync:
            self.reducer.watch(list(_find_tensors(output)))
        return output

    def _post_forward(self, output: Any) -> Any:
        """Skip torch's sink, which ties all outputs together: an output that the loss leaves out stays left out."""
        find_unused, static = self.find_unused_parameters, self.static_graph
        if not (find_unused or static):
            return super()._post_forward(output)
        self.find_unused_parameters = self.static_graph = False
        try:
            return super()._post_forward(output)
        finally:
            self.find_unused_parameters, self.static_graph = find_unused, static

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Torch's context manager for uneven inputs. A rank may have caught an error in its last batch."""
        return _Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce each bucket with `hook(state, bucket)`, which returns a future of one tensor."""
        self._check_comm_hook(hook)
        self._take_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        builtin = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self._take_comm_hook(self.process_group, builtin[comm_hook_type.name])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _take_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self.reducer.set_comm_hook(state, hook)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__name__))

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """Compare the ranks' models before torch does: its comparison fails without naming the difference."""
        parameters, expect_sparse = super()._build_params_for_reducer()
        self._bucket_caps = BucketCaps.of(self)
        if self._arguments is not None and self._arguments.get("init_sync", True):
            facts = self._facts(self._arguments, parameters, expect_sparse)
            device = parameters[0].device
            # Every rank uses rank 0's bucket caps, as in torch.
            caps = model_check.check_same_everywhere(facts, self._bucket_caps, self.process_group, device)
            self._bucket_caps, self.bucket_bytes_cap = caps, caps.bytes
        return parameters, expect_sparse

    def _facts(
        self, arguments: Mapping[str, Any], parameters: list[torch.nn.Parameter], expect_sparse: list[bool]
    ) -> model_check.Facts:
        """Facts that must agree between ranks: the order and size of the collectives depend on them."""
        settings = {
            "find_unused_parameters": bool(self.find_unused_parameters),
            "static_graph": bool(arguments.get("static_graph")),
            "gradient_as_bucket_view": bool(self.gradient_as_bucket_view),
            "skip_all_reduce_unused_params": bool(self.skip_all_reduce_unused_params),
            "forward_sync_buffers": bool(self.broadcast_buffers),
            "mixed_precision": self.mixed_precision,
            "comm": name_of(arguments["comm"]),
            "bucket_cap_mb": "auto" if self._tunes_buckets else "",
            "round_robin_groups": arguments["round_robin_groups"],
        }
        syncs_buffers = self.broadcast_buffers or arguments.get("forward_sync_buffers") is not None
        return {
            model_check.SETTINGS: [(name, str(value)) for name, value in settings.items()],
            "parameters": model_check.parameters(_names(self.module, parameters), parameters, expect_sparse),
            "buffers": model_check.buffers(self.named_module_buffers if syncs_buffers else {}),
        }

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Build our reducer and logger instead of torch's."""
        frozen = self._frozen(parameters)
        if self.mixed_precision is not None:
            for index, parameter in enumerate([*parameters, *(parameter for _, parameter, _ in frozen)]):
                parameter._idx = index  # type: ignore[attr-defined]
        pipeline_steps.install()  # Before telemetry, so that a schedule's recorded step holds the wait for the buckets.
        self._recorder = self._join_telemetry()
        self.reducer = TorchReducer(
            parameters,
            _names(self.module, parameters),
            expect_sparse_gradient or [False] * len(parameters),
            module=self.module,
            group=self.process_group,
            comm_factory=self._comm_factory,
            settings=self._settings(static_graph),
            recorder=self._recorder,
            frozen=frozen,
        )
        if self._recorder is not None:
            self._recorder.follow_gradients(self.reducer)
            self._recorder.compare_replicas(self.reducer.parameters, self.reducer.names)
            if drops := self.reducer.core.settings.drops:
                self._recorder.event("layers_dropped", layers=str(drops), parameters=len(drops.layers_of))
        # The module outlives its wrapper, and may be wrapped again.
        weakref.finalize(self, self.reducer.remove_hooks).atexit = False
        self.logger = Logger(self.reducer, self._construction_facts(parameters))
        self._passing_sync_batchnorm_handle(self.module)

    def _frozen(self, parameters: list[torch.nn.Parameter]) -> list[Frozen]:
        """The parameters that are not reduced now, but are once they require gradients."""
        excluded = {id(parameter) for parameter in parameters}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in self.parameters_to_ignore or parameter.requires_grad:
                excluded.add(id(parameter))
        frozen: dict[int, Frozen] = {}
        for module_name, module in self.module.named_modules():
            sparse = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
            for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
                if id(parameter) not in excluded:
                    frozen.setdefault(id(parameter), (name, parameter, bool(sparse)))
        return list(frozen.values())

    def _settings(self, static_graph: bool) -> Settings:
        """The constructor's choices in the reducer's form."""
        limits, drops = self._bucket_caps.rebuilt(), DropPlan(self.module)
        if drops and (static_graph or self._tunes_buckets):
            setting, expected = (
                ("static_graph", "False") if static_graph else ("bucket_cap_mb", "a number of MB or None")
            )
            raise ConfigError(setting, f"{expected} with a LayerDrop, whose steps differ", static_graph or "auto")
        return Settings(
            first_limits_bytes=limits,  # Torch starts with them only with find_unused_parameters. They allow overlap.
            rebuilt_limits_bytes=limits,
            find_unused=self.find_unused_parameters,
            skip_unused=self.skip_all_reduce_unused_params and self.find_unused_parameters and not static_graph,
            static_graph=static_graph,
            drops=drops,
            as_views=self.gradient_as_bucket_view,
            tunes_buckets=self._tunes_buckets,
        )

    def _construction_facts(self, parameters: list[torch.nn.Parameter]) -> dict[str, str | int]:
        """The fields of `_get_ddp_logging_data` that the constructor determines, under torch's names."""
        return {
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or [])),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.broadcast_buffers),
            "backend_name": dist.get_backend(self.process_group),
            "rank": dist.get_rank(self.process_group),
            "world_size": dist.get_world_size(self.process_group),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "dtypes": ", ".join(sorted({_CPP_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules())),
            "is_multi_device_module": int(self.is_multi_device_module),
        }

    @goes_on_without
    def _join_telemetry(self) -> ModuleObserver | None:
        if self._telemetry_config is None:
            return None
        from ddpobs import telemetry

        recorder = telemetry.join(
            self,
            self._telemetry_config,
            self.process_group,
            {
                "reducer": "ddpobs",
                "find_unused_parameters": self.find_unused_parameters,
                "gradient_as_bucket_view": self.gradient_as_bucket_view,
                "static_graph": self.static_graph,
                "broadcast_buffers": self.broadcast_buffers,
                "bucket_cap_mb": None if self._tunes_buckets else self.bucket_bytes_cap / 2**20,
            },
        )
        if recorder is not None:
            weakref.finalize(self, telemetry.forget, recorder).atexit = False
        return recorder

    def _sync_buffers(self) -> None:
        recorder = self._recorder
        if recorder is None:
            super()._sync_buffers()
            return
        launched_ns = recorder.buffers_began()
        super()._sync_buffers()
        recorder.communicated("buffers", launched_ns, recorder.now())
        if recorder.waits_for_forward:
            recorder.replicas_ready(() if hasattr(self, "buffer_hook") else self.named_module_buffers.items())

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in another rank's backward, call for call, as a rank that is out of data."""
        self.reducer.participate_with_zeros()

    def _match_unused_params_allreduce(self) -> None:
        """Nothing to do: `participate_with_zeros` has done it with the buckets."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the recorder, which belongs to the process, and the token, which must not get into a file."""
        state: dict[str, Any] = super().__getstate__()
        config = self._telemetry_config
        return state | {"_recorder": None, "_telemetry_config": config and replace(config, token=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use this process's own token."""
        config = state["_telemetry_config"]
        if config is not None:
            state = state | {"_telemetry_config": replace(config, token=os.environ.get("DDPOBS_TOKEN") or None)}
        super().__setstate__(state)


class _Join(Join):
    """If an error interrupted a rank's last backward, ends it before the rank reports that it is out of data."""

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._enable and kind is None:
            joinables: list[Any] = self._joinables
            for ddp in joinables:
                if ddp.reducer is not None:
                    ddp.reducer.end_interrupted()
        super().__exit__(kind, *error)


def _refuse_compiled_reducer() -> None:
    """Refuse the mode in which torch registers its own hooks, which would reduce each gradient beside ours."""
    from torch._dynamo import config

    mode = config.optimize_ddp
    if mode == "python_reducer":
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp", "True or False, because that mode has its own reducer", mode
        )


def _tunes_buckets(arguments: Mapping[str, Any]) -> bool:
    """Return whether the buckets are to be tuned, and refuse what cannot be together with it."""
    cap = arguments.get("bucket_cap_mb")
    if isinstance(cap, str) and cap != "auto":
        raise ConfigError("bucket_cap_mb", 'a number of MB, None or "auto"', cap)
    if cap != "auto":
        return False
    plain = {"comm": (None, "all_reduce"), "round_robin_groups": (1,)}
    others = {"static_graph": (None, False), "find_unused_parameters": (None, False), "bucket_cap_mb_list": (None, [])}
    for name, allowed in {**plain, **others}.items():
        if (value := arguments.get(name, allowed[0])) not in allowed:
            raise ConfigError(name, f'{allowed[0]} with bucket_cap_mb="auto"', value)
    return True


def _names(module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]

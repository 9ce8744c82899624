"""`DistributedDataParallel`: torch's module face around our reducer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import parallel
from torch.nn.parallel.distributed import _find_tensors

from ddpobs.config import TelemetryConfig, resolve
from ddpobs.reducer import Reducer, Settings

if TYPE_CHECKING:
    from ddpobs.recorder import ModuleRecorder


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with a reducer in Python that can tell where the time goes.

    Takes every argument of torch's, and is an instance of it. Only the gradient reduction is replaced: torch builds
    its C++ reducer in `_ddp_init_helper`, and ours is built there instead.

    Args:
        module: What is to be trained.
        *args: As torch's.
        telemetry: None (as `DDPOBS_TELEMETRY` says), False, True, a collector's address, or settings. Off costs
            nothing and starts no thread.
        **kwargs: As torch's.

    Raises:
        ConfigError: A telemetry setting holds a value that it cannot have.
        UnusedParametersError: From backward, on every rank, where a parameter got no gradient on some rank and
            `find_unused_parameters` is off.
    """

    # Torch declares its C++ classes here.
    reducer: Any
    logger: Any

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        telemetry: bool | str | TelemetryConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self._telemetry_config = resolve(telemetry, os.environ)
        self._recorder: ModuleRecorder | None = None
        super().__init__(module, *args, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, then have the reducer told by the outputs' gradients that a backward begins."""
        if self._recorder is not None:
            self._recorder.forward_began(inputs)
        # A forward without gradients may come between another forward and its backward, and must not matter to them.
        if torch.is_grad_enabled():
            self.reducer.prepare(self.require_backward_grad_sync)
        output = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.watch(list(_find_tensors(output)))
        return output

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's: `hook(state, bucket)` reduces each bucket and returns a future of one tensor."""
        self._check_comm_hook(hook)
        self._take_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        builtin = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self._take_comm_hook(self.process_group, builtin[comm_hook_type.name])

    def _take_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self.reducer.set_comm_hook(state, hook)
        self.logger._set_comm_hook_name(hook.__qualname__)

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Build our reducer and logger in the place of torch's."""
        # The limits that torch begins with only where it looks for unused parameters: overlap from the first step on.
        first_limits, _ = self._bucket_config.compute_bucket_size_limits(
            static_graph=False, find_unused_parameters=True
        )
        _, rebuilt_limits = self._bucket_config.compute_bucket_size_limits(
            static_graph=static_graph, find_unused_parameters=self.find_unused_parameters
        )
        settings = Settings(
            first_limits_bytes=first_limits,
            rebuilt_limits_bytes=rebuilt_limits or [self._bucket_config.first_bucket_bytes_cap, self.bucket_bytes_cap],
            find_unused=self.find_unused_parameters,
            static_graph=static_graph,
        )
        self._recorder = self._join_telemetry()
        self.reducer = Reducer(
            parameters,
            _names(self.module, parameters),
            expect_sparse_gradient or [False] * len(parameters),
            group=self.process_group,
            settings=settings,
            recorder=self._recorder,
        )
        self.logger = Logger()
        self.logger.set_construction_data_and_log(type(self.module).__name__, [], -1, self.forward_sync_buffers)
        self._passing_sync_batchnorm_handle(self.module)

    def _join_telemetry(self) -> ModuleRecorder | None:
        if self._telemetry_config is None:
            return None
        from ddpobs import telemetry

        return telemetry.join(
            self,
            self._telemetry_config,
            self.process_group,
            {
                "reducer": "ddpobs",
                "find_unused_parameters": self.find_unused_parameters,
                "gradient_as_bucket_view": True,
                "static_graph": self.static_graph,
                "broadcast_buffers": self.forward_sync_buffers,
                "bucket_cap_mb": self.bucket_bytes_cap / 2**20,
            },
        )

    def _sync_buffers(self) -> None:
        recorder = self._recorder
        if recorder is None:
            super()._sync_buffers()
            return
        began = recorder.now()
        super()._sync_buffers()
        recorder.communicated("buffers", began, recorder.now())

    def _match_all_reduce_for_bwd_pass(self) -> None:
        # Our verdict on unused parameters travels before the buckets, so a joined rank shadows it first.
        if self.reducer._may_skip:
            self.process_group.allreduce([self.reducer._get_local_used_map()]).wait()
        super()._match_all_reduce_for_bwd_pass()

    def _match_unused_params_allreduce(self) -> None:
        """Done already, before the buckets."""

    def __getstate__(self) -> dict[str, Any]:
        """As torch's; the recorder stays with the process and is made anew."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"_recorder": None}


class Logger:
    """Stands where torch's C++ logger stands, whose members insist on the C++ reducer."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}

    def set_construction_data_and_log(
        self, module_name: str, device_ids: list[int], output_device: int, broadcast_buffers: bool
    ) -> None:
        """Keep what `_get_ddp_logging_data` gives back."""
        self._facts |= {
            "module_name": module_name,
            "device_ids": device_ids,
            "output_device": output_device,
            "broadcast_buffers": broadcast_buffers,
        }

    def set_runtime_stats_and_log(self) -> None:
        """Telemetry has every step's."""

    def set_error_and_log(self, message: str) -> None:
        """Keep the last error."""
        self._facts["error"] = message

    def _set_static_graph(self) -> None:
        self._facts["static_graph"] = True

    def _set_comm_hook_name(self, name: str) -> None:
        self._facts["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._facts["join_uneven_inputs"] = True

    def _get_ddp_logging_data(self) -> Any:
        return _LoggingData(self._facts)


class _LoggingData:
    """Split as torch's: texts and numbers."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.strs_map = {name: value for name, value in facts.items() if isinstance(value, str)}
        self.ints_map = {name: int(value) for name, value in facts.items() if isinstance(value, int)}


def _names(module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]

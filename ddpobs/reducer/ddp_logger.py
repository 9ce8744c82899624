"""The logger that torch's module code expects, with the fields of `_get_ddp_logging_data`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddpobs.reducer.module_reducer import ModuleReducer
from ddpobs.torch_seam.collectives import gloo_threads


class Logger:
    """Replaces torch's C++ logger, which requires the C++ reducer.

    Args:
        reducer: The module's.
        facts: The constructor's choices, under torch's names.
    """

    _ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")

    def __init__(self, reducer: ModuleReducer, facts: Mapping[str, str | int]) -> None:
        self._reducer = reducer
        self._facts = dict(facts)

    def set_runtime_stats_and_log(self) -> None:
        """Nothing to do: the reducer takes its samples itself."""

    def set_error_and_log(self, message: str) -> None:
        """Keep the last error."""
        self._reducer.error = message

    def _set_static_graph(self) -> None:
        self._facts["static_graph"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._facts["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._facts["join_uneven_inputs"] = 1

    def _get_ddp_logging_data(self) -> _LoggingData:
        return _LoggingData(self._facts | self._current_facts())

    def _current_facts(self) -> dict[str, str | int]:
        reducer, buckets = self._reducer, self._reducer.core.buckets
        environment = {name.lower(): os.environ.get(name, "N/A") for name in self._ENVIRONMENT}
        parameters = reducer.core.layout.parameters  # More than at first, if some were unfrozen.
        rebuilt: dict[str, str | int] = {}
        if reducer.rebuilt:
            rebuilt = {
                "rebuilt_bucket_sizes": ", ".join(map(str, reducer.bucket_bytes)),
                "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, bucket.members)) for bucket in buckets),
            }
        error: dict[str, str | int] = {"error": reducer.error, "has_error": 1} if reducer.error else {}
        threads = gloo_threads(reducer.core.group)
        return {
            **environment,
            **rebuilt,
            **error,
            **({} if threads is None else {"gloo_num_threads": threads}),
            **reducer.timings.facts(),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
            "bucket_sizes": ", ".join(map(str, reducer.first_bucket_bytes)),
            "has_rebuilt_buckets": int(reducer.rebuilt),
            "iteration": reducer.timings.sampled_iteration,
            "num_buckets_reduced": reducer.core.buckets_reduced,
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.gradient_order)),
            "unused_parameter_size": reducer.core.unused.size_bytes,
        }


class _LoggingData:
    """Texts and numbers in separate tables, as in torch's class."""

    def __init__(self, facts: Mapping[str, str | int]) -> None:
        self.strs_map = {name: value for name, value in facts.items() if isinstance(value, str)}
        self.ints_map = {name: value for name, value in facts.items() if isinstance(value, int)}

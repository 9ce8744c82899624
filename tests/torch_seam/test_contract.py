"""The private members of torch that the training side uses. A removed or changed member fails here by its name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import Logger as TorchLogger
from torch._C._distributed_c10d import Reducer
from torch.nn.parallel import distributed as torch_ddp

import ddpobs
from ddpobs.ddp import DistributedDataParallel
from ddpobs.reducer.ddp_logger import Logger
from ddpobs.reducer.torch_members import TorchReducer
from ddpobs.torch_seam import pipelining
from ddpobs.torch_seam.bucket_caps import BucketCaps

TorchDDP = torch_ddp.DistributedDataParallel
SOURCES = Path(ddpobs.__file__).parent

OVERRIDDEN = {
    "_build_params_for_reducer": [],
    "_ddp_init_helper": ["parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"],
    "_match_all_reduce_for_bwd_pass": [],
    "_match_unused_params_allreduce": [],
    "_post_forward": ["output"],
    "_register_builtin_comm_hook": ["comm_hook_type"],
    "_sync_buffers": [],
    "register_comm_hook": ["state", "hook"],
}
"""Methods that torch's module code calls and ddpobs overrides, with their parameters."""

CALLED = {
    "_check_sync_bufs_pre_fwd": [],
    "_build_debug_param_to_name_mapping": ["parameters"],
    "_check_comm_hook": ["hook"],
    "_get_ddp_logging_data": [],
    "_passing_sync_batchnorm_handle": ["module"],
}
"""Methods of torch's module that ddpobs calls, with their parameters."""

ON_GROUPS_AND_WORKS = {
    "_enable_collectives_timing": torch.distributed.ProcessGroup,
    "_get_duration": torch.distributed.Work,
    "_get_op_type": torch.distributed.Work,
    "wait": torch._C.Future,
}
"""Methods that CUDA's times need of NCCL, the kind of a work, and the wait of a work's future."""

ON_THE_REDUCER = {
    "_remove_autograd_hooks",
    "_set_forward_pass_work_handle",
    "_set_static_graph",
    "_update_process_group",
}
"""Methods of torch's C++ reducer that `attach` calls, or that are wrapped for works in Python."""

FROM_MODULES = {
    "torch": {"_foreach_copy_"},
    "torch._C": {
        "_current_autograd_node",
        "_current_graph_task_id",
        "_DisableTorchDispatch",
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_profiler",
        "_storage_Use_Count",
        "_will_engine_execute_node",
    },
    "torch._C._profiler": {"_RecordFunctionFast"},
    "torch._C._distributed_c10d": {
        "GradBucket",
        "_create_work_from_future",
        "HashStore",
        "PrefixStore",
        "_compute_bucket_assignment_by_size",
        "_register_comm_hook",
    },
    "torch._dynamo.trace_rules": {"add"},
    "torch.autograd.profiler": {"_is_profiler_enabled"},
    "torch.autograd.Variable._execution_engine": {"queue_callback"},
    "torch.distributed": {"_Work", "_functional_collectives"},
    "torch.distributed._functional_collectives": {"wait_tensor"},
    "torch.distributed.distributed_c10d": {
        "_get_default_group",
        "_get_default_store",
        "_get_default_timeout",
        "_get_process_group_name",
        "_new_process_group_helper",
        "_world",
    },
    "torch.nn.Module": {"_call_impl", "_compiled_call_impl"},
    "torch.nn.parallel.distributed": {"_find_tensors"},
    "torch.utils.data.dataloader": {
        "_BaseDataLoaderIter",
        "_MultiProcessingDataLoaderIter",
        "_SingleProcessDataLoaderIter",
    },
    "torch.utils._pytree": {"tree_leaves", "tree_map_only"},
}
"""Private functions and classes, by module."""


def parameters_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_torch_has_what_we_override_with_the_same_parameters(name: str) -> None:
    assert parameters_of(getattr(TorchDDP, name)) == OVERRIDDEN[name]
    assert parameters_of(getattr(DistributedDataParallel, name)) == OVERRIDDEN[name]


@pytest.mark.parametrize("name", CALLED)
def test_torch_has_the_methods_that_we_call(name: str) -> None:
    assert parameters_of(getattr(TorchDDP, name)) == CALLED[name]


@pytest.mark.parametrize("name", ON_GROUPS_AND_WORKS)
def test_groups_and_works_have_what_cudas_times_need(name: str) -> None:
    assert hasattr(ON_GROUPS_AND_WORKS[name], name)


def test_torchs_reducer_has_the_methods_that_attaching_calls() -> None:
    assert set(dir(Reducer)) >= ON_THE_REDUCER


@pytest.mark.parametrize("module", FROM_MODULES)
def test_the_private_functions_are_in_their_modules(module: str) -> None:
    importlib.import_module("torch._dynamo")
    holder: Any = torch
    for part in module.split(".")[1:]:
        holder = getattr(holder, part)
    assert FROM_MODULES[module] <= set(dir(holder))


def test_no_other_private_name_of_torch_is_used() -> None:
    declared = set().union(*FROM_MODULES.values(), OVERRIDDEN, CALLED, ON_THE_REDUCER)
    declared |= {
        "_C",
        "_nn",
        "_distributed_c10d",
        "_dynamo",
        "_execution_engine",
        "_DEFAULT_FIRST_BUCKET_BYTES",
        "_comm_hooks",
        "_pytree",
    }
    used = {name for path in SOURCES.rglob("*.py") for name in private_names_of_torch(ast.parse(path.read_text()))}
    assert used <= declared


def private_names_of_torch(tree: ast.AST) -> set[str]:
    """Private names imported from torch, attributes of `torch....`, and torch's members of `self` and `model`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= set((node.module or "").split(".")) | {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node).split(".")[0]
            of_module = root in ("self", "model", "super()") and hasattr(TorchDDP, node.attr)
            if of_module or root in ("torch", "dist", "Variable"):
                names.add(node.attr)
    return {name for name in names if re.fullmatch(r"_[^_].*", name)}


@pytest.mark.parametrize(("attribute", "ours"), [("reducer", TorchReducer), ("logger", Logger)])
def test_ours_has_every_member_that_torchs_module_code_uses(attribute: str, ours: type) -> None:
    source = inspect.getsource(torch_ddp)
    for ours_instead in OVERRIDDEN:
        source = source.replace(inspect.getsource(getattr(TorchDDP, ours_instead)), "")
    called = set(re.findall(rf"\b{attribute}\.(\w+)\(?", source))
    called -= {"warning", "info", "debug", "exception", "error"}  # The file's own `logging` logger has the same name.
    assert len(called) > 4
    assert called <= set(dir(ours))


@pytest.mark.parametrize(("theirs", "ours"), [(Reducer, TorchReducer), (TorchLogger, Logger)])
def test_ours_has_every_public_member_of_torchs(theirs: type, ours: type) -> None:
    of_construction = {"set_construction_data_and_log"}  # Ours gives the facts to the logger's constructor.
    members = {name for name in dir(theirs) if not name.startswith(("__", "_pybind11"))} - of_construction
    assert len(members) > 5
    assert members <= set(dir(ours))


def test_dynamo_keeps_its_latest_compilations_with_times_function_and_reason() -> None:
    utils = importlib.import_module("torch._dynamo.utils")
    needed = {"start_time_us", "end_time_us", "co_name", "co_filename", "co_firstlineno", "recompile_reason"}
    assert {field.name for field in dataclasses.fields(utils.CompilationMetrics)} >= needed
    assert isinstance(utils.get_compilation_metrics(), list)


def test_torchs_pipelines_have_what_we_wrap_and_read() -> None:
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    stages = importlib.import_module("torch.distributed.pipelining.stage")
    assert pipelining.schedule_classes() == [schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti]
    assert all("step" in vars(schedule) for schedule in pipelining.schedule_classes())
    subclasses = [kind for kind in vars(schedules).values() if inspect.isclass(kind) and "step" in vars(kind)]
    assert len(subclasses) == 3  # The abstract class besides.
    assert parameters_of(stages._PipelineStageBase.perform_reduce_grad) == ["grad_scale_factor"]
    of_schedules, of_stages = (inspect.getsource(module) for module in (schedules, stages))
    assert {"_stage", "_stages", "_has_backward", "_n_microbatches"} <= set(re.findall(r"self\.(\w+) = ", of_schedules))
    assert {"submod", "stage_index", "num_stages", "group"} <= set(re.findall(r"self\.(\w+) = ", of_stages))
    assert "isinstance(self.submod, DistributedDataParallel)" in of_stages
    assert "self.submod.reducer.prepare_for_backward(" in of_stages


@pytest.mark.skipif(not hasattr(torch_ddp, "_BucketCapacityConfig"), reason="torch 2.12 and older compute them inline")
@pytest.mark.parametrize("arguments", [(None, None), (3, None), (None, [1, 2])])
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("find_unused", [False, True])
def test_bucket_caps_are_torchs(arguments: tuple[Any, Any], static_graph: bool, find_unused: bool) -> None:
    config = torch_ddp._BucketCapacityConfig.create(*arguments, False)
    module: Any = SimpleNamespace(
        bucket_bytes_cap=config.bucket_bytes_cap,
        bucket_bytes_cap_default=config.first_bucket_bytes_cap < config.bucket_bytes_cap,
        bucket_bytes_cap_list=list(config.per_bucket_bytes_caps),
    )
    caps = BucketCaps.of(module)
    first, _ = config.compute_bucket_size_limits(static_graph, find_unused)
    assert caps.first_step(static_graph=static_graph, find_unused_parameters=find_unused) == first
    assert caps.rebuilt() == config.compute_bucket_size_limits(False, True)[0]


def test_the_engine_predicts_which_parameters_it_will_reach() -> None:
    reached, left_out = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in (reached, left_out)]
    answers: list[list[bool]] = []

    def query(_: torch.Tensor) -> None:
        answers.append([torch._C._will_engine_execute_node(node) for node in nodes])

    stacked = torch.stack([reached, left_out])
    stacked.register_hook(query)
    reached.register_post_accumulate_grad_hook(query)
    (reached * 2).sum().backward()
    (stacked.sum() * 2).backward()
    assert answers == [[True, False], [True, True], [True, True]]


def test_inside_a_tensors_hook_the_current_node_is_the_tensors() -> None:
    output = nn.Parameter(torch.ones(2)) * 2
    nodes_at_hook: list[Any] = []
    output.register_hook(lambda _: nodes_at_hook.append(torch._C._current_autograd_node()))
    output.sum().backward()
    assert nodes_at_hook == [output.grad_fn]


def test_a_queued_callback_runs_once_after_the_last_gradient() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    order: list[str] = []

    def ready(_: torch.Tensor) -> None:
        if not order:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: order.append("end"))
        order.append("gradient")

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ready)
    torch.stack([p.sum() for p in parameters]).sum().backward()
    assert order == ["gradient"] * 3 + ["end"]


def test_an_error_in_a_queued_callback_comes_out_of_backward() -> None:
    parameter = nn.Parameter(torch.ones(2))

    def fail() -> None:
        raise LookupError("from the callback")

    parameter.register_post_accumulate_grad_hook(
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(fail)
    )
    with pytest.raises(LookupError, match="from the callback"):
        parameter.sum().backward()

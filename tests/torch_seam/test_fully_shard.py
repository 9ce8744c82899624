"""The private members of torch's FSDP2 that the training side uses."""

from __future__ import annotations

import inspect
import re

from torch.distributed.fsdp import fully_shard as public  # noqa: F401 - the seam finds what the script has imported.
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param

from ddpobs.torch_seam import fully_shard


def assigned(kind: type) -> set[str]:
    """Attributes that a class's methods set, and its methods and properties."""
    return set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(kind))) | set(dir(kind))


def test_a_unit_has_the_methods_that_are_wrapped() -> None:
    unit = fully_shard.unit_class()
    assert list(inspect.signature(unit.unshard).parameters) == ["self", "async_op"]
    assert list(inspect.signature(unit.wait_for_unshard).parameters) == ["self"]
    assert list(inspect.signature(unit.post_backward).parameters) == ["self", "unused"]


def test_a_state_has_the_methods_that_are_wrapped() -> None:
    state = fully_shard.state_class()
    assert list(inspect.signature(state._root_pre_forward).parameters) == ["self", "module", "args", "kwargs"]
    assert list(inspect.signature(state._root_post_backward_final_callback).parameters) == ["self"]
    assert list(inspect.signature(state._lazy_init).parameters) == ["self"]


def test_units_and_states_have_what_is_read() -> None:
    assert assigned(fully_shard.unit_class()) >= {
        *(
            "fsdp_params",
            "mesh_info",
            "post_forward_mesh_info",
            "device",
            "reduce_grads",
            "all_reduce_grads",
            "_module_fqn",
        ),
        *("_all_gather_result", "_all_gather_comm", "_reduce_scatter_comm", "is_unsharded"),
    }
    assert assigned(fully_shard.state_class()) >= {"_is_root", "_modules", "_state_ctx", "_fsdp_param_groups"}
    assert assigned(_fsdp_param.FSDPParam) >= {
        *("_param_fqn", "_module_info", "_orig_size", "orig_dtype", "param_dtype", "reduce_dtype", "sharded_param"),
    }
    assert "shard_process_group" in assigned(_fsdp_common.FSDPMeshInfo)
    assert "replicate_process_group" in assigned(_fsdp_common.DDPMeshInfo)


def test_a_unit_calls_its_communication_object_with_the_names_that_are_read() -> None:
    source = inspect.getsource(_fsdp_collectives.foreach_all_gather)
    assert "all_gather_comm(" in source
    assert "async_op=async_op" in source
    assert "reduce_scatter_comm(" in inspect.getsource(_fsdp_collectives.foreach_reduce)

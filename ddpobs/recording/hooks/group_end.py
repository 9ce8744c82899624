"""A hook before the end of the default process group, whose store may end with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddpobs.never_raises import never_raises
from ddpobs.torch_seam.patching import Patches


class GroupEnd:
    """Calls a function before the script destroys the default process group, while installed.

    Args:
        before: Called on the script's thread.
    """

    def __init__(self, before: Callable[[], object]) -> None:
        self._before = never_raises(before)
        self._patches = Patches()

    def install(self) -> None:
        """Install the hook."""
        for module in (dist, dist.distributed_c10d):
            self._patches.put(module, "destroy_process_group", self._destroy)

    def remove(self) -> None:
        """Remove the hook."""
        self._patches.undo()

    def _destroy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy_process_group(group: Any = None) -> Any:
            if group is None or group is dist.group.WORLD:
                self._before()
            return original(group)

        return destroy_process_group

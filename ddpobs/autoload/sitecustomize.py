"""Runs at the start of every Python process under `ddpobs run`.

It does next to nothing: only when the process itself imports torch's DDP is that class taught to attach telemetry to
what it builds. A launcher or a loader worker builds none and so pays nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TARGET = "torch.nn.parallel.distributed"


class _Finder(MetaPathFinder):
    """Finds torch's DDP module as usual, and has its class taught once it is loaded."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _TARGET or self._busy:
            return None
        self._busy = True
        try:
            spec = find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Teaching(spec.loader)
        return spec


class _Teaching(Loader):
    """The module's own loader, followed by `_teach`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _teach(module.DistributedDataParallel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _teach(ddp: Any) -> None:
    """Attach telemetry to every DDP that torch builds; ours has its own and is left alone."""
    build = ddp.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        build(self, *args, **kwargs)
        if not any(base.__module__ == "ddpobs.ddp" for base in type(self).__mro__):
            _attach(self)

    __init__.__wrapped__ = build  # type: ignore[attr-defined]
    ddp.__init__ = __init__


def _attach(model: Any) -> None:
    try:
        from ddpobs.attachment import attach

        attach(model, telemetry=None)
    except Exception as error:  # telemetry never stops a training
        print(f"ddpobs: no telemetry for this model: {error}", file=sys.stderr)  # noqa: T201


def _run_shadowed() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(ModuleType("sitecustomize"))


sys.meta_path.insert(0, _Finder())
_run_shadowed()

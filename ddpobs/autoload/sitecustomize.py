"""Runs at the start of every Python process under `ddpobs run`.

It does next to nothing: only when the process itself imports torch's DDP is that class taught to attach telemetry to
what it builds. A launcher or a loader worker builds none and so pays nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Finds the modules of torch's parallel classes as usual, and has the classes taught once they are loaded."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _TAUGHT or self._busy:
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
        _teach(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _teach(module: ModuleType) -> None:
    """Have the module's class followed by what is ours, once an instance of it or of a subclass is built."""
    name, built = _TAUGHT[module.__name__]
    parallel = getattr(module, name)
    build = parallel.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        build(self, *args, **kwargs)
        try:
            built(self)
        except Exception as error:  # telemetry never stops a training
            _say(f"no telemetry for this model: {error}")

    __init__.__wrapped__ = build  # type: ignore[attr-defined]
    parallel.__init__ = __init__


def _attach(model: Any) -> None:
    """Attach telemetry to a DDP that torch built; ours has its own and is left alone."""
    if any(base.__module__ == "ddpobs.ddp" for base in type(model).__mro__):
        return
    from ddpobs.attachment.attachment import attach

    attach(model, telemetry=None)


def _advise(_model: Any) -> None:
    """Say once what to do instead of DataParallel."""
    if _TAUGHT.pop(_DATA_PARALLEL, None):
        from ddpobs.errors import DataParallelError

        raise DataParallelError


def _say(text: str) -> None:
    print(f"ddpobs: {text}", file=sys.stderr, flush=True)  # noqa: T201


_DATA_PARALLEL = "torch.nn.parallel.data_parallel"
_TAUGHT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "torch.nn.parallel.distributed": ("DistributedDataParallel", _attach),
    _DATA_PARALLEL: ("DataParallel", _advise),
}


def _run_shadowed() -> None:
    """Run the sitecustomize that this one hides, if there is one, and let it have its name."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


def _begin() -> None:
    """Teach what is loaded already (by a .pth file), and wait for the rest."""
    for name in list(_TAUGHT):
        if name in sys.modules:
            _teach(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


_begin()
_run_shadowed()

"""What `ddpobs run` changes in a Python process that it started; `sitecustomize.py` runs this file.

It does almost nothing at start-up. If the process imports torch's DDP, that class is patched to attach telemetry to
each new instance. A launcher or a loader worker creates no instance and pays nothing. A training that builds none is
noticed at the first step of an optimizer, and rank 0 prints the reason. An error that ends a rank before its first
model is reported.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Finds the modules of torch's parallel classes as usual, and patches the classes once they are loaded."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _PATCHES or self._busy:
            return None
        self._busy = True
        try:
            spec = find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    """The module's own loader, followed by `_patch`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _PATCHES[module.__name__](module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _patch(parallel: Any, after_init: Callable[[Any], None]) -> None:
    """Patch a class: after an instance of it or of a subclass is built, call our function."""
    original = parallel.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        _note_explained()
        try:
            after_init(self)
        except Exception as error:  # Telemetry never stops a training.
            _print(f"no telemetry for this model: {error}")

    __init__.__wrapped__ = original  # type: ignore[attr-defined]
    parallel.__init__ = __init__


def _patch_ddp(module: Any) -> None:
    module.__ddpobs_loaded_ns__ = time.monotonic_ns()  # The account of the start-up.
    module.__ddpobs_waits__ = _waits
    _patch(module.DistributedDataParallel, _attach)


def _watch_barriers(module: Any) -> None:
    """Note the main thread's waits at barriers until the first model is built: the account of the start-up."""
    import threading

    original = module.barrier

    def barrier(*args: Any, **kwargs: Any) -> Any:
        began_ns = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            is_start_up = not _explained and len(_waits) < _MAX_WAITS
            if is_start_up and threading.get_ident() == threading.main_thread().ident:
                _waits.append((time.monotonic_ns() - began_ns, f"barrier at {_caller()}"))

    module.barrier = functools.wraps(original)(barrier)


def _caller() -> str:
    """The innermost line outside of libraries: `train.py:31 prepare`."""
    from sysconfig import get_path

    libraries = tuple(str(get_path(name)) for name in ("stdlib", "purelib", "platlib"))
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    code = frame.f_code
    function = "" if code.co_name == "<module>" else f" {code.co_name}"
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}{function}"  # noqa: PTH119


def _patch_data_parallel(module: Any) -> None:
    _patch(module.DataParallel, _advise)


def _watch_optimizers(module: Any) -> None:
    """Look at the first optimizer step whether the training has built a module that is observed.

    Torch iterates over the hooks while it calls them, and fails if one is removed meanwhile: this one stays.
    """
    _explained.clear()
    _note("torch")
    module.register_optimizer_step_post_hook(_explain)


def _explain(*_: object) -> None:
    """Print on rank 0, once, why this training has no telemetry; other doors than DDP's join it themselves."""
    if not _was_joined():
        _forget_place()
    if _explained or "ddpobs.horovod" in sys.modules or _was_joined():
        return
    _note_explained()
    try:
        import torch.distributed as dist

        from ddpobs.config import from_environment

        initialised = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if initialised else int(os.environ.get("RANK", "0"))
        size = dist.get_world_size() if initialised else int(os.environ.get("WORLD_SIZE", "1"))
        if rank == 0 and not from_environment(os.environ).quiet:
            alone = "one process only trains here, without DistributedDataParallel: start it with torchrun"
            unseen = "no DistributedDataParallel, fully_shard module or DeepSpeed engine (FSDP1 has no telemetry)"
            _print(f"no telemetry: {alone if size == 1 else unseen}")
    except Exception as error:
        _print(f"no telemetry: {error}")


def _note_explained() -> None:
    """Note, also for `ddpobs run`, that a module is observed or that the reason why none is was printed."""
    _explained[:] = [True]
    _note("explained")


def _note(suffix: str) -> None:
    """Leave a file for `ddpobs run`, which reads it once the command has ended."""
    folder, launch = os.environ.get("DDPOBS_PLACES"), os.environ.get("DDPOBS_LAUNCH")
    if folder and launch:
        with suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
            with open(f"{folder}/{launch}.{suffix}", "wb"):  # noqa: PTH123
                pass


def _forget_place() -> None:
    """Remove the early place of a rank that trains without telemetry: its later end is not one before its training."""
    if "DDPOBS_EARLY_PLACE" in os.environ:
        from ddpobs.recording.place.early_place import remove

        remove(os.environ)


def _was_joined() -> bool:
    telemetry = sys.modules.get("ddpobs.telemetry")
    return telemetry is not None and telemetry.was_joined()


def _attach(model: Any) -> None:
    """Attach telemetry to an instance of torch's DDP; ours has its own telemetry."""
    if any(base.__module__ == "ddpobs.ddp" for base in type(model).__mro__):
        return
    from ddpobs.attachment.attachment import attach

    attach(model, telemetry=None)


def _patch_fully_shard(module: Any) -> None:
    """Attach telemetry to a model that FSDP2 shards at its first forward, when torch knows its root."""
    original = module.FSDPState._root_pre_forward

    def _root_pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_root is None:
            from ddpobs.torch_seam import fully_shard

            _note_explained()
            # Torch's next call. Its error reaches the script, for a second call raises none.
            fully_shard.initialise(self)
            try:
                _attach_root(self, *args[1:])
            except Exception as error:  # Telemetry never stops a training.
                _print(f"no telemetry for this model: {error}")
        return original(self, *args, **kwargs)

    _root_pre_forward.__wrapped__ = original  # type: ignore[attr-defined]
    module.FSDPState._root_pre_forward = _root_pre_forward


def _attach_root(state: Any, inputs: Any, named: Any) -> None:
    """Attach telemetry to the root of a state, whose first forward begins."""
    from ddpobs.fsdp.attachment import attach
    from ddpobs.torch_seam import fully_shard

    attachment = attach(fully_shard.root_of(state), telemetry=None)
    if attachment is not None:  # This call is under way in a method that was not wrapped yet.
        attachment.forward_began(inputs, named)


def _patch_deepspeed(module: Any) -> None:
    _patch(module.DeepSpeedEngine, _attach_engine)


def _attach_engine(engine: Any) -> None:
    """Attach telemetry to an engine of DeepSpeed's."""
    from ddpobs.deepspeed.attachment import attach

    attach(engine, telemetry=None)


def _watch_failures(module: Any) -> None:
    """In torchrun's agent, note how a rank's process ended in the place that it left; only its parent learns that."""
    original = module.ProcessFailure.__post_init__

    def __post_init__(self: Any) -> None:  # noqa: N807
        original(self)
        try:
            from ddpobs.config import from_environment
            from ddpobs.export.spool import folder_of
            from ddpobs.recording.place.dead_places import note_exit
            from ddpobs.recording.place.last_place import FOLDER

            note_exit(folder_of(from_environment(os.environ).spool) / FOLDER, self.pid, self.exitcode)
        except Exception as error:
            _print(f"the exit status of process {self.pid} is not recorded: {error}")

    module.ProcessFailure.__post_init__ = __post_init__


def _watch_errors() -> bool:
    """In a rank, report an error that ends it before its first model; a program that a rank starts is no rank.

    A place that it leaves lets `ddpobs run` report a signal that ends it. Returns whether this process is a rank.
    """
    if not any(os.environ.get(name) for name in _RANKS):
        return False
    own = ":".join(os.environ.get(name, "") for name in (*_RANKS, "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"))
    if os.environ.get(_RANK) == own or "DDPOBS_RANK_PROCESSES" in os.environ:
        return False
    try:
        from ddpobs.recording.place.early_place import end_in_order, leave, rank_of, remove

        if rank_of(os.environ) is None:
            return False
        leave(os.environ)
    except Exception as failure:
        _print(f"errors before the first model are not reported: {failure}")
        return False
    os.environ[_RANK] = own
    environ = dict(os.environ)  # The script may change the variables.
    original, pid = sys.excepthook, os.getpid()

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        original(kind, error, trace)
        report(error)

    def report(error: Any) -> None:
        is_rank = os.getpid() == pid and not hasattr(sys, "ps1")
        if error is None or _reported or not is_rank or _explained or _was_joined():
            return
        if isinstance(error, KeyboardInterrupt) or type(error).__name__ in _OF_LAUNCHERS:
            return
        _reported.append(True)
        try:
            from ddpobs.launch.early_failure import report as send

            line = send(error, environ)
            remove(environ)
            if line:
                print(line, file=sys.stderr, flush=True)  # noqa: T201
        except Exception as failure:
            _print(f"the error is not reported: {failure}")

    sys.excepthook = excepthook

    def end() -> None:
        report(getattr(sys, "last_value", None))  # A hook that the script installs may not call ours.
        if os.getpid() == pid:
            end_in_order(environ)

    atexit.register(end)
    return True


def _check_hosts() -> None:
    """Measure this host together with the other ranks, before the script begins; ends this rank if one is slow."""
    try:
        from ddpobs.launch.host_check.gate import pass_check

        pass_check(os.environ)
    except Exception as failure:
        _print(f"hosts are not compared, because of {failure!r}")


def _advise(_model: Any) -> None:
    """Report once the alternative to DataParallel."""
    if not _advised:
        from ddpobs.errors import DataParallelError

        _advised.append(True)
        raise DataParallelError


def _print(text: str) -> None:
    print(f"ddpobs: {text}", file=sys.stderr, flush=True)  # noqa: T201


_explained: list[bool] = []
"""Not empty if a module is observed, or if the reason why none is was printed."""
_waits: list[tuple[int, str]] = []
"""Time of each wait at a barrier before the first model, in nanoseconds, and its place."""
_MAX_WAITS = 1000
"""Maximum number of these waits: a program without a model may wait for ever."""
_advised: list[bool] = []
_reported: list[bool] = []
"""Not empty if the error that ends this rank was reported."""
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables with the rank of a process, by launcher."""
_RANK = "DDPOBS_RANK"
"""Variable of a rank, by which a program that it starts knows that it is none."""
_OF_LAUNCHERS = ("ChildFailedError", "SignalException")
"""Errors by which torchrun reports a rank's end; where it has a rank's variables itself, it is none."""
_PATCHES: dict[str, Callable[[Any], None]] = {
    "torch.nn.parallel.distributed": _patch_ddp,
    "torch.distributed.distributed_c10d": _watch_barriers,
    "torch.distributed.fsdp._fully_shard._fsdp_state": _patch_fully_shard,
    "deepspeed.runtime.engine": _patch_deepspeed,
    "torch.nn.parallel.data_parallel": _patch_data_parallel,
    "torch.optim.optimizer": _watch_optimizers,
    "torch.distributed.elastic.multiprocessing.errors": _watch_failures,
}
"""Function that prepares each module once it is loaded."""


def _begin() -> None:
    """Patch the modules that are loaded already, by a .pth file for example, and the others when they are imported."""
    for name in list(_PATCHES):
        if name in sys.modules:
            _PATCHES[name](sys.modules[name])
    sys.meta_path.insert(0, _Finder())
    if _watch_errors() and "DDPOBS_CHECK_HOSTS" in os.environ:
        _check_hosts()


_begin()

"""Errors for the user, each with its facts as attributes.

DdpobsError
  ConfigError             a setting (ValueError)
  DataParallelError       torch.nn.DataParallel instead of DDP (TypeError)
  WireError               a batch (ValueError)
  TraceFileError          a trace that is to be imported (ValueError)
  CollectorError          a request to the collector (RuntimeError)
  HorovodError            a call of Horovod's interface (ValueError)
    HorovodUnsupportedError  a part of Horovod that does not exist here (NotImplementedError)
  HorovodInternalError    a collective of Horovod's interface that failed (RuntimeError)
    MismatchError         the ranks called different collectives
  HostsUpdatedInterrupt   other hosts for an elastic training (RuntimeError)
  MpiError                process groups over MPI (RuntimeError)
  StepOrderError          the order of backward, synchronize and step (AssertionError)
  ReducerError            the reduction of gradients (RuntimeError)
    UnusedParametersError
    ModelsDifferError
"""

from __future__ import annotations

from collections.abc import Mapping


class DdpobsError(Exception):
    """Base class of the errors that ddpobs raises on purpose."""


class ConfigError(DdpobsError, ValueError):
    """A setting has an invalid value.

    Attributes:
        setting: The setting's name, as the user wrote it (an environment variable or an argument).
        expected: Values that are valid.
        actual: The invalid value.
    """

    def __init__(self, setting: str, expected: str, actual: object) -> None:
        super().__init__(f"{setting}: expected {expected}, got {actual!r}")
        self.setting, self.expected, self.actual = setting, expected, actual


class DataParallelError(DdpobsError, TypeError):
    """The model is wrapped in `torch.nn.DataParallel`, which is not distributed training."""

    def __init__(self) -> None:
        super().__init__(
            "torch.nn.DataParallel is one process that copies the model to its GPUs anew in every forward: there are "
            "no ranks, buckets or all-reduces to observe. Start one process per GPU with torchrun, and give the model "
            "itself to DistributedDataParallel"
        )


class WireError(DdpobsError, ValueError):
    """A batch does not follow the wire schema.

    Attributes:
        field: Path of the offending field, such as ``spans.done_ns``; ``$`` for the batch as a whole.
        expected: Values that the schema allows.
        actual: The value in the batch.
    """

    def __init__(self, field: str, expected: str, actual: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {actual}")
        self.field, self.expected, self.actual = field, expected, actual


class TraceFileError(DdpobsError, ValueError):
    """A file that is to be imported is no trace, or not a whole one.

    Attributes:
        path: The file.
        expected: What was expected in it.
        actual: What came instead.
    """

    def __init__(self, path: object, expected: str, actual: object) -> None:
        super().__init__(f"{path}: expected {expected}, got {actual}")
        self.path, self.expected, self.actual = path, expected, actual


class CollectorError(DdpobsError, RuntimeError):
    """The collector did not answer a request, or refused it.

    Attributes:
        url: Address of the request.
        status: HTTP status of the refusal; None if no collector answered.
    """

    def __init__(self, message: str, url: str, status: int | None = None) -> None:
        super().__init__(message)
        self.url, self.status = url, status


class ReducerError(DdpobsError, RuntimeError):
    """The reduction of gradients cannot continue; torch's DDP raises a RuntimeError in the same cases.

    Attributes:
        interrupted: An error ended the backward of some ranks. Nothing else is wrong: the batch can be dropped.
    """

    interrupted = False


class UnusedParametersError(ReducerError):
    """A synchronised backward left parameters without a gradient, which the settings do not allow.

    The message ends with the phrases of torch's DDP, which raises in the next forward: a search finds them.

    Attributes:
        parameters: Names of the parameters, each with the ranks on which it got no gradient.
    """

    def __init__(self, parameters: dict[str, list[int]], indices: Mapping[str, int] | None = None) -> None:
        names = "; ".join(f"{name} (rank {_ranks(ranks)})" for name, ranks in list(parameters.items())[:20])
        more = f"; and {len(parameters) - 20} more" if len(parameters) > 20 else ""
        super().__init__(
            f"{len(parameters)} parameters got no gradient in this backward: {names}{more}. Every rank "
            "reduces all of them. Pass find_unused_parameters=True, or make every parameter take part in the loss on "
            f"every rank{_TORCH_MESSAGE}{_missing_by_rank(parameters, indices or {})}"
        )
        self.parameters = parameters


class ModelsDifferError(ReducerError):
    """The ranks built different models."""


class HorovodError(DdpobsError, ValueError):
    """A call of Horovod's interface that ddpobs does not support, or not in the current state."""


class HorovodUnsupportedError(HorovodError, NotImplementedError):
    """A part of Horovod that ddpobs does not have. A NotImplementedError too, as Horovod's refusals."""


class HorovodInternalError(DdpobsError, RuntimeError):
    """A collective of Horovod's interface failed: a rank has left, or a time limit has passed.

    `ddpobs.horovod.elastic.run` restores the last commit and calls the function again.
    """


class MismatchError(HorovodInternalError):
    """The ranks called different collectives, or one with different tensors or arguments. Raised on every rank.

    A HorovodInternalError, as in Horovod. `elastic.run` raises it: another attempt would fail in the same way.
    """


class HostsUpdatedInterrupt(DdpobsError, RuntimeError):  # noqa: N818 - Horovod's name
    """Hosts were added to an elastic training, or will be removed; `elastic.run` starts the function again.

    Attributes:
        skip_sync: Hosts were only removed, so that all remaining ranks have the same state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the training have changed")
        self.skip_sync = skip_sync


class MpiError(DdpobsError, RuntimeError):
    """MPI is missing, the ranks were not started by it, or it cannot do what a collective asks for."""


class StepOrderError(DdpobsError, AssertionError):
    """`backward`, `synchronize`, `step` and `zero_grad` were called in an order that would lose gradients.

    An AssertionError, as in Horovod.
    """


_TORCH_MESSAGE = (
    ".\nTorch's DDP raises this in the next forward: Expected to have finished reduction in the prior iteration before "
    "starting a new one. Enable unused parameter detection by passing the keyword argument "
    "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by making sure all `forward` "
    "function outputs participate in calculating loss. For the names, torch has you set the environment variable "
    "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL; here they are."
)


def _missing_by_rank(parameters: Mapping[str, list[int]], indices: Mapping[str, int]) -> str:
    """Torch's lines about each rank: names and indices of its missing parameters."""
    lines = []
    for rank in sorted({rank for ranks in parameters.values() for rank in ranks})[:20]:
        names = [name for name, ranks in parameters.items() if rank in ranks][:20]
        lines.append(f"Parameters which did not receive grad for rank {rank}: {', '.join(names)}")
        if indices:
            numbers = ", ".join(str(indices[name]) for name in names)
            lines.append(f"Parameter indices which did not receive grad for rank {rank}: {numbers}")
    return "".join(f"\n{line}" for line in lines)


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))

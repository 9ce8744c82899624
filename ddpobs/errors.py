"""The errors a user can meet, as one small tree. Each carries its facts as attributes."""

from __future__ import annotations


class DdpobsError(Exception):
    """Whatever ddpobs raises on purpose."""


class ConfigError(DdpobsError, ValueError):
    """A setting holds a value that it cannot have.

    Attributes:
        setting: The setting's name, as the user wrote it (an environment variable or an argument).
        expected: What it may hold.
        came: What it held.
    """

    def __init__(self, setting: str, expected: str, came: object) -> None:
        super().__init__(f"{setting}: expected {expected}, got {came!r}")
        self.setting, self.expected, self.came = setting, expected, came


class DataParallelError(DdpobsError, TypeError):
    """`torch.nn.DataParallel` came where distributed training was expected."""

    def __init__(self) -> None:
        super().__init__(
            "torch.nn.DataParallel is one process that copies the model to its GPUs anew in every forward: there are "
            "no ranks, buckets or all-reduces to observe. Start one process per GPU with torchrun, and give the model "
            "itself to DistributedDataParallel"
        )


class WireError(DdpobsError, ValueError):
    """A batch that does not follow the wire schema.

    Attributes:
        field: Path of the offending field, such as ``spans.done_ns``; ``$`` for the batch as a whole.
        expected: What the schema asks for.
        came: What came instead.
    """

    def __init__(self, field: str, expected: str, came: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {came}")
        self.field, self.expected, self.came = field, expected, came


class ReducerError(DdpobsError, RuntimeError):
    """The reduction of gradients cannot go on; torch's DDP raises a RuntimeError there too.

    Attributes:
        interrupted: An error ended some ranks' backward, and nothing else is wrong: the batch can be dropped.
    """

    interrupted = False


class UnusedParametersError(ReducerError):
    """A synchronised backward left parameters without a gradient and nobody said it may.

    Attributes:
        parameters: Names of the parameters, each with the ranks that left it out.
    """

    def __init__(self, parameters: dict[str, list[int]]) -> None:
        shown = "; ".join(f"{name} (rank {_ranks(ranks)})" for name, ranks in list(parameters.items())[:20])
        more = f"; and {len(parameters) - 20} more" if len(parameters) > 20 else ""
        super().__init__(
            f"{len(parameters)} parameters got no gradient in this backward: {shown}{more}. Every rank "
            "reduces all of them. Pass find_unused_parameters=True, or make every parameter take part in the loss on "
            "every rank"
        )
        self.parameters = parameters


class ModelsDifferError(ReducerError):
    """The ranks built different models."""


class HorovodError(DdpobsError, ValueError):
    """A call of Horovod's that cannot be answered, or not here."""


class StepOrderError(DdpobsError, AssertionError):
    """backward, `synchronize`, `step` and `zero_grad` were called in an order that would lose gradients.

    An AssertionError, as Horovod raises it.
    """


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))

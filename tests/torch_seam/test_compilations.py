"""Reading of dynamo's records, from real compilations."""

from __future__ import annotations

import sys
from time import monotonic_ns
from types import SimpleNamespace

import pytest
import torch

from ddpobs.torch_seam.compilations import CompilationLog


def test_a_function_compiled_anew_for_another_size_is_read_once_with_its_reason() -> None:
    torch._dynamo.reset()
    log = CompilationLog()
    log.read()

    @torch.compile(backend="eager", dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    began_ns = monotonic_ns()
    double(torch.ones(2))
    (first,) = log.read() or []
    double(torch.ones(3))
    (second,) = log.read() or []
    assert log.read() == []
    assert (first.function, first.reason) == ("double", "")
    assert (second.function, second.file, second.reason.startswith("tensor 'x' size mismatch at index 0")) == (
        "double",
        __file__,
        True,
    )
    assert (
        began_ns - 10**7 < first.began_ns < first.ended_ns <= second.began_ns < second.ended_ns < monotonic_ns() + 10**7
    )


@pytest.mark.parametrize(("dynamo", "read"), [(None, []), (SimpleNamespace(), None)])
def test_a_process_without_dynamo_has_no_compilations_and_another_dynamo_reports_none(
    dynamo: object, read: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    assert CompilationLog().read() == read

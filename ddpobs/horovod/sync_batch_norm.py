"""Batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ddpobs.errors import HorovodError
from ddpobs.horovod.allreduce import allreduce
from ddpobs.horovod.operations import Sum
from ddpobs.horovod.process import ProcessSet, global_process_set


class SyncBatchNorm(nn.BatchNorm1d):
    """Normalizes each channel by the mean and variance of all ranks' batches, whose sizes may differ.

    Takes the arguments of `torch.nn.BatchNorm2d`, and inputs of shape [batch, channels, …]. Unlike
    `torch.nn.SyncBatchNorm` it works on the CPU too. In evaluation it uses the running statistics.

    Args:
        *args: As for `torch.nn.BatchNorm2d`.
        process_set: The ranks whose batches count.
        **kwargs: As for `torch.nn.BatchNorm2d`.
    """

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._process_set = process_set

    @override
    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise HorovodError(f"SyncBatchNorm: expected an input of shape [batch, channels, …], got {input.dim()}D")

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; in training every rank must call this.

        Source: the biased variance normalizes and the unbiased one enters the running variance, as in BatchNorm.
        """
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(values.dim()) if dim != 1]
        count = values.new_tensor([values.numel() // values.shape[1]])
        sums = self._total(torch.cat([values.sum(dims), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = values - _by_channel(mean, values)
        variance = self._total(centred.square().sum(dims)) / total
        if self.training and self.running_mean is not None:
            self._update(mean.detach(), variance.detach() * (total / (total - 1).clamp(min=1)))
        normalized = centred * _by_channel(torch.rsqrt(variance + self.eps), values)
        if self.affine:
            normalized = normalized * _by_channel(self.weight, values) + _by_channel(self.bias, values)
        return normalized.to(input.dtype)

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, whose gradient is the sum of the ranks' gradients."""
        return allreduce(values, op=Sum, process_set=self._process_set)

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))

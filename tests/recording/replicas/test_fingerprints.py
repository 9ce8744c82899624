"""Hashes of gradients, parameters and buffers: exact in the bits, and sampled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpobs import wire
from ddpobs.recording.replicas.fingerprints import Fingerprints, Hashes, hash_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [24, 4099])
def test_one_flipped_bit_changes_the_hash(dtype: torch.dtype, elements: int) -> None:
    tensor = torch.arange(elements, dtype=torch.float32).to(dtype)
    (original,) = Hashes([tensor]).values()
    octets = tensor.numel() * tensor.element_size()
    for octet in {*range(17), octets - 9, octets - 1}:
        for bit in range(8):
            flipped = tensor.clone()
            flipped.view(torch.uint8)[octet] ^= 1 << bit
            assert Hashes([flipped]).values()[0] != original, (octet, bit)


@pytest.mark.parametrize("elements", [4, 4099])
def test_the_hash_depends_on_the_values_and_not_on_their_place_in_memory(elements: int) -> None:
    tensor = torch.arange(2 * elements, dtype=torch.float32).reshape(2, elements)
    others = [tensor.t().contiguous().t(), torch.cat([torch.ones(1), tensor.view(-1)])[1:].view(2, elements)]
    values = Hashes([tensor, *others]).values()
    assert len(set(values.tolist())) == 1


def test_signed_zeros_nan_sparse_and_empty_tensors_have_hashes() -> None:
    assert hash_of(torch.tensor([0.0, 1.0])) != hash_of(torch.tensor([-0.0, 1.0]))
    assert hash_of(torch.tensor([float("nan")])) == hash_of(torch.tensor([float("nan")]))
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3))
    assert hash_of(rows) == hash_of(rows.coalesce())
    assert hash_of(torch.zeros(0)).item() == 0
    assert hash_of(torch.tensor([True, False])) != hash_of(torch.tensor([False, True]))


def test_two_tensors_of_one_value_each_have_different_hashes() -> None:
    assert hash_of(torch.ones(64)) != hash_of(torch.full((64,), 2.0))


class Sampled:
    def __init__(self, every: int) -> None:
        self.module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.sent: list[wire.Fingerprint] = []
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        self.parameters, self.names = list(parameters), list(names)
        self.fingerprints = Fingerprints(every, self.parameters, self.names, self.sent.append, 0)

    def forward_began(self) -> None:
        self.fingerprints.forward_began(self.module.named_buffers())

    def step(self) -> None:
        self.forward_began()
        self.fingerprints.backward_began()
        self.module(torch.ones(4, 3)).sum().backward()
        self.fingerprints.reduced()


def test_the_first_and_every_nth_step_is_sampled_at_the_next_forward() -> None:
    sampled = Sampled(every=3)
    for _ in range(5):
        sampled.step()
    sampled.fingerprints.flush()
    assert [sent.synchronised for sent in sampled.sent] == [0, 3]
    (first, _) = sampled.sent
    assert first.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert first.buffer_names == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert (len(first.gradients), len(first.parameters), len(first.buffers)) == (4, 4, 3)


def test_a_missing_gradient_is_zero_and_the_others_keep_their_place() -> None:
    sampled = Sampled(every=1)
    sampled.module[0].weight.requires_grad_(False)
    sampled.step()
    sampled.forward_began()
    sampled.fingerprints.flush()
    assert sampled.sent[0].gradients[0] == 0
    assert sampled.sent[0].gradients[3] != 0


def test_without_a_period_nothing_is_sampled() -> None:
    sampled = Sampled(every=0)
    sampled.step()
    sampled.step()
    sampled.fingerprints.flush()
    assert sampled.sent == []


def test_a_part_of_a_buffer_hashes_as_a_tensor_of_its_own() -> None:
    flat = torch.arange(12, dtype=torch.float32)
    for first in range(4):
        part = flat[first : first + 7]
        assert hash_of(part) == hash_of(part.clone())


def test_failed_backward_passes_and_ones_without_data_count() -> None:
    sampled = Sampled(every=2)
    sampled.step()
    sampled.forward_began()
    sampled.fingerprints.backward_began()  # Failed, or another rank's.
    sampled.step()
    sampled.forward_began()
    sampled.fingerprints.flush()
    assert [sent.synchronised for sent in sampled.sent] == [0, 2]


def test_added_parameters_are_in_the_next_sample_only() -> None:
    sampled = Sampled(every=1)
    sampled.step()
    sampled.parameters.append(nn.Parameter(torch.ones(2)))
    sampled.names.append("late")
    sampled.step()
    sampled.forward_began()
    sampled.fingerprints.flush()
    assert [len(sent.parameters) for sent in sampled.sent] == [len(sent.names) for sent in sampled.sent] == [4, 5]


def test_tensors_whose_operations_may_communicate_are_left_out() -> None:
    class Sharded(nn.Parameter):
        pass

    assert Hashes([Sharded(torch.ones(3)), torch.ones(3)]).values().tolist()[0] == 0


def test_a_fingerprint_beyond_the_collectors_limits_is_not_taken() -> None:
    sampled = Sampled(every=1)
    sampled.names[:] = ["x" * 600_000] * 4
    sampled.step()
    sampled.forward_began()
    sampled.fingerprints.flush()
    assert sampled.sent == []

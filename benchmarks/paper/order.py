"""Compare the order of gradients with the order of registration: sections 3.2.3, 4.2 and 6.2.1 of the DDP paper.

    python -m benchmarks.paper.order [--models bert] [--passes 10] [--json FILE] [--smoke]

One process goes forward and back. DDP first fills its buckets in the reverse order of `parameters()`, then rebuilds
them in the order of the first backward. A bucket can be sent when its last gradient is there and those before it are
sent. The table has the share of all gradients' bytes that had arrived by then, the mean over all buckets, with both
fillings. No time is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.models import MODELS, Model
from benchmarks.source import facts, keep
from benchmarks.tables import rows_of

_CAPS_BYTES = (2**20, 25 * 2**20)
"""Of the first bucket and the others, as DDP's defaults."""
_MEASURED = ("benchmarks/models.py", "benchmarks/paper/order.py")


class Branches(nn.Module):
    """A trunk and four branches of different size, of which the data decides the order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 512)  # Registered first, used last.
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(512, w), nn.Linear(w, 512)) for w in (512, 2048, 4096, 8192)
        )
        self.trunk = nn.Linear(512, 512)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Chain the branches in the order of the first inputs."""
        x = self.trunk(inputs)
        for index in inputs[0, :4].argsort().tolist():
            x = x + self.branches[index](x)
        return self.head(x)  # type: ignore[no-any-return]


CASES = MODELS | {
    "branches": Model("four branches, 15.7 M", Branches, lambda: (torch.randn(8, 512),), lambda result: [result])
}


def orders(model: Model, passes: int) -> tuple[list[int], list[list[int]]]:
    """Return the parameters' sizes in bytes, and their indices in the order of each backward's gradients."""
    torch.manual_seed(0)
    module = model.build()
    parameters = list(module.parameters())
    arrived: list[int] = []
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived.append(index))
    found = []
    for _ in range(passes):
        arrived.clear()
        model.loss(module(*model.batch())).backward()
        found.append(list(arrived))
    return [parameter.numel() * parameter.element_size() for parameter in parameters], found


def filled(order: list[int], sizes: list[int]) -> list[list[int]]:
    """Return buckets filled in an order: each is closed by the gradient that reaches its cap."""
    buckets: list[list[int]] = [[]]
    caps = iter(_CAPS_BYTES)
    cap, size = next(caps), 0
    for index in order:
        buckets[-1].append(index)
        size += sizes[index]
        if size >= cap:
            buckets.append([])
            cap, size = next(caps, cap), 0
    return [bucket for bucket in buckets if bucket]


def complete(buckets: list[list[int]], order: list[int], sizes: list[int]) -> float:
    """Return the share of all bytes that has arrived when a bucket is complete and those before it, mean of buckets."""
    arrived = dict(zip(order, np.cumsum([sizes[index] for index in order]) / sum(sizes[i] for i in order), strict=True))
    ready = [max(arrived[index] for index in bucket if index in arrived) for bucket in buckets]
    return float(np.mean(np.maximum.accumulate(ready)))


def judged(model: Model, passes: int) -> dict[str, Any]:
    """Return a model's facts: see the table's head."""
    sizes, found = orders(model, passes)
    first, last = found[0], found[-1]
    registered = [index for index in reversed(range(len(sizes))) if index in set(first)]
    return {
        "parameters": len(sizes),
        "elsewhere": float(np.mean([np.mean(np.array(order) != registered) for order in found])),
        "orders": len({tuple(order) for order in found}),
        "passes": passes,
        "buckets": len(filled(first, sizes)),
        "registered": float(
            np.mean([complete(filled(registered, sizes), order, sizes) for order in found[1:] or [last]])
        ),
        "rebuilt": float(np.mean([complete(filled(first, sizes), order, sizes) for order in found[1:] or [last]])),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return a row for each model."""
    rows = [
        [
            CASES[name].title,
            str(row["parameters"]),
            f"{100 * row['elsewhere']:.0f} %",
            str(row["buckets"]),
            f"{100 * row['registered']:.0f} %",
            f"{100 * row['rebuilt']:.0f} %",
        ]
        for name, row in found.items()
    ]
    head = ["model", "parameters", "gradients at another place", "buckets"]
    return rows_of([*head, "complete after, as registered", "rebuilt"], rows)


def main() -> None:
    """Go through the models, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.models, options.passes = "tiny,branches", 3
    torch.set_num_threads(1)
    found = {name: judged(CASES[name], options.passes) for name in options.models.split(",")}
    keep(facts(*_MEASURED) | {"experiment": "order", "found": found}, options.json)
    print(table(found))


if __name__ == "__main__":
    main()

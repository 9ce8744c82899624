"""The experiments of the DDP paper (arXiv 2006.15704), repeated on links of a chosen speed.

    sudo python -m benchmarks.paper buckets [--rates 1gbit] [--models resnet50] [--rounds 5] [--json FILE] [--smoke]
    python -m benchmarks.paper.plots

`experiments` has each experiment with the claim of its source, `training` runs on every rank.
"""

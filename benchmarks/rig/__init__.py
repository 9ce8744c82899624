"""Real parts that benchmarks and tests start: a collector, its databases, a training on real ranks."""

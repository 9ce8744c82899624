"""Trainings with one fault by real means, for tests and benchmarks."""

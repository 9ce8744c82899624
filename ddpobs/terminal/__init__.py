"""Text that a training prints on rank 0: the run's address at the start, and its verdict at the end."""

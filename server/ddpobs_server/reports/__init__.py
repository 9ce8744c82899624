"""Responses about a run: stored columns in, analysis out, cached until the run's next commit."""

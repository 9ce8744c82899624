"""The answers about a run: stored columns in, analysis out, cached by the run's last commit."""

"""Hooks that report the user's calls, signals and errors; the user's code stays unchanged."""

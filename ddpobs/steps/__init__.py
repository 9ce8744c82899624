"""Journal entries become steps, and steps become columns."""

"""Conversion of journal entries into steps, and of steps into columns."""

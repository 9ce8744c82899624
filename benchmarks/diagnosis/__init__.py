"""The truth set of the diagnosis: real runs with a known fault, each beside a balanced twin."""

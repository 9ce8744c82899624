"""The kinds of figures, one in a file; `figures/registry.py` has the guide for adding another."""

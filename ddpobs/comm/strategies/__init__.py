"""The strategies that a string names, each in its file; `comm/registry.py` has the guide for adding another."""

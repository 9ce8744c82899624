"""Causes that several findings name."""

"""Flat gradient buffers: which parameters share one, and where each gradient lies in it."""

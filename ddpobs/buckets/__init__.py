"""Flat gradient buffers: which parameters share a buffer, and the part of it that each gradient occupies."""

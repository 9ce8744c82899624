"""Readings of the process, the host and the device."""

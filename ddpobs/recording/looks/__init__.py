"""Looks of the telemetry thread at the training thread."""

"""Timestamps of what the training thread goes through: entries of a journal, no interpretation."""

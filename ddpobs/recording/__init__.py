"""Stamps of the training thread's events: entries of a journal, without interpretation."""

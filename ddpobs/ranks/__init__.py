"""Exchanges among the ranks through the rendezvous store, without a collective."""

"""The way of a batch into the tables."""

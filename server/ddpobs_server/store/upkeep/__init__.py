"""Upkeep of the tables: removal, compaction and checks."""

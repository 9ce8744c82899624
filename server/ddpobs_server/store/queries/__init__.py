"""Reads: rows and columns of runs, attempts and workspaces, and the small writes beside them."""

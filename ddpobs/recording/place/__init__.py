"""The place of a process, in a file that outlives it."""

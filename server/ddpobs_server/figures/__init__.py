"""Pictures of a run, made once in Python for the page, the report file and notebooks."""

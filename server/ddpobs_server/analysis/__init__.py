"""Pure functions of arrays: columns in, findings out, no I/O."""

"""Pure functions of arrays: columns in, findings out."""

"""Facts by which replicas are compared."""

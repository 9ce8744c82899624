"""Ingest of batches; each is acknowledged after its commit."""

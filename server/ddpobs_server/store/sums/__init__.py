"""Sums that are kept beside the columns, so that neither metrics nor old runs need the columns."""

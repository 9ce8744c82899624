"""Many runs together: where their rank time went, and which hosts are slow in different jobs."""

"""Where the run's wall time went."""

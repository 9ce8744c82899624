"""The collector: takes batches in, keeps them, and says which rank is slow and why."""

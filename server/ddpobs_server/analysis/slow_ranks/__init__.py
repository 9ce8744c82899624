"""Which rank is slow, in which phase, since when and why."""

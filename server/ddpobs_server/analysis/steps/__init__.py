"""Steps joined over ranks, in bins, with their clocks and levels."""

"""What the all-reduces take, and what other buckets or links would take."""

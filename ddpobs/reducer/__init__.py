"""The gradient reduction: a gradient is ready, its bucket is launched, backward waits for all buckets."""

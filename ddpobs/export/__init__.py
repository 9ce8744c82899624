"""The way out of the training process: records become batches, and batches travel."""

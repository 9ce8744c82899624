"""Export from the training process: records become batches, and batches are delivered."""

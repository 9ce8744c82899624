"""Rules and words that the training side and the collector share, so that both judge and print alike."""

"""What the command line reads and writes: objects of the user's Python files, weights, data, predictions."""

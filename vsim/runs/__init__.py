"""A run: its configuration, how it is assembled, the training loop, and evaluation."""

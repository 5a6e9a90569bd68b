"""Checkpoints: save the state of a run after a step in one file, and resume or fork a run from the file."""

"""Save the state of a run after a step in one file, the checkpoint, and resume or fork a run from the file."""

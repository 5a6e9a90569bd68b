"""Checkpoints: what a run is after a step, in one file, and how a run resumes or forks from it."""

"""The record of a run: how it grows, what a user sees meanwhile, its curves and its files."""

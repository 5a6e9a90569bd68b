"""Comparisons of runs, and the questions to them. Nothing here trains."""

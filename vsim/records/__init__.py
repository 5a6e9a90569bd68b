"""The record of a run: history, description, progress, figures and loggers."""

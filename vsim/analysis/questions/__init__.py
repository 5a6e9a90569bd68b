"""The questions to a comparison, one file each: a function of its runs, and a result that shows itself."""

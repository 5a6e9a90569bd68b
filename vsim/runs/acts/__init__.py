"""What happens between two steps, one act a file. Acts do not import each other; their orders are in `fit.py`."""

"""Published and derived results, reproduced by command: `python -m tests.reproductions [NAME …]`.

A script is one file: its `TABLE`, and `measure(quick)`, which returns a value, or one value a seed, for each row.
"""

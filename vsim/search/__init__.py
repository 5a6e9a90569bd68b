"""Train several strategies: compare them, sweep over settings, search."""

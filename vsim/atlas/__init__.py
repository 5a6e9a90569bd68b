"""An atlas of communication-efficient training: every strategy on the same tasks, with equal tuning and budgets."""

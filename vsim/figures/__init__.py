"""Figures: how they look, and how they are written. Only `paper` imports matplotlib."""

"""The style of figures, and their files. Only `paper` imports matplotlib."""

"""The page of a comparison: one HTML file, whose sliders set network, compute and size of the model."""

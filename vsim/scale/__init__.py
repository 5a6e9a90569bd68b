"""Other sizes than those that train: ladders of sizes, and scaling laws."""

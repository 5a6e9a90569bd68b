"""The core: runs as rows of one matrix, and the loop that trains them."""

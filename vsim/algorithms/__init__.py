"""The algorithms, a file each; `vsim.strategy` names them."""

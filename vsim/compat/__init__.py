"""The predecessors' names: what scripts for EXO Gym and diloco-sim import."""

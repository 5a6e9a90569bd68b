"""Names that scripts for EXO Gym and diloco-sim import."""

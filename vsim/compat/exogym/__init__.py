"""EXO Gym's package: a script that imports from `exogym` runs when it imports from `vsim.compat.exogym`.

Arguments have EXO Gym's names and positions here, and only here. The objects are vsim's.
"""

from vsim.compat.exogym.trainer import LocalTrainer, Trainer

__all__ = ["LocalTrainer", "Trainer"]

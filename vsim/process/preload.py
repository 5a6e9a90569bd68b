"""Imported by multiprocessing's fork server before it forks the nodes' processes. It must not compute in parallel.

Neither OpenMP's threads nor a device that has been started survive a fork.
"""

import gc

import torch

import vsim.process.child
from vsim.engine.machine import settle_vector_functions

torch.compiler.disable(vsim.process.child.main)  # imports what an optimizer's first step does, as long as torch itself
settle_vector_functions()
gc.collect()
gc.freeze()  # a collection in a fork would write to the memory that all share

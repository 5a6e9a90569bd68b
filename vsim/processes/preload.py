"""Modules that multiprocessing's fork server imports before it forks the nodes' processes.

This module must not compute in parallel, because neither OpenMP's threads nor an initialized device survive a fork.
"""

import gc

import torch

import vsim.processes.child
from vsim.engine.machine import settle_vector_functions

torch.compiler.disable(vsim.processes.child.main)  # imports modules that an optimizer's first step imports
settle_vector_functions()
gc.collect()
gc.freeze()  # otherwise garbage collection in a fork would write to memory pages shared with the server

"""Imported by the process from which others are forked, after everything else."""

import gc

from tests.engine_starts import prepare
from tllm.runtime.kernels.backend import INTERPRETED

if INTERPRETED:
    from tests.interpreter import interpret_faster

    interpret_faster()
prepare()
gc.freeze()  # collections of garbage in the others do not look at what is here

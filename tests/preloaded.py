"""Imported by the process from which others are forked, after everything else."""

import gc

from tests.engine_starts import prepare

prepare()
gc.freeze()  # collections of garbage in the others do not look at what is here

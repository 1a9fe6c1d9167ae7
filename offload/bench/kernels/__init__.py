"""Kernels on the shapes of real models, each beside its bound and its peers in one run.

Every module here that has `cases(device, quick)` is a set of measurements: of one op, its `OP`, or
of several, its `OPS`.
"""

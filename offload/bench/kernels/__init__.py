"""Kernels on the shapes of real models, each beside its bound and its peers in one run.

Every module here that has `cases(device, quick)` is one op's set of measurements.
"""

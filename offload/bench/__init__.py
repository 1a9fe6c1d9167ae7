"""Measures what offload reaches, beside the bound of the same run and beside other ways to run a
model.
"""

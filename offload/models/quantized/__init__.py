"""Quantised weights: which modules get which format, folders of them written and read, and how
modules compute with them.
"""

"""Kernels: one folder each."""

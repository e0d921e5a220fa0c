"""Latent attention of draft trees over pages: `op.MlaAttention` on a CUDA device, `ref.attend` anywhere.

Kernels: plan.cu (once per step), attend.cu and combine.cu (once per layer); columns.cu and nodes.cu are others, for Hopper.
layout.cuh states what a result's bits depend on.
"""

"""The target and the drafter as sequences of this project's CUDA kernels, for one step that a graph can capture."""

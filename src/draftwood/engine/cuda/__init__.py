"""The step on a GPU: one graph for each size, and a loop that is a step ahead of what it has read."""

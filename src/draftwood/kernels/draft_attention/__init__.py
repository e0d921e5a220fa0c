"""The drafter's attention: a block of queries over its row's context window and over the block itself, non-causal."""

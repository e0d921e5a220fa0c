"""Compaction of an accepted path: latents of all layers in one launch."""

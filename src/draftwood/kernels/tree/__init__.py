"""Drafter logits -> the best candidates of every depth -> draft trees, all on the device."""

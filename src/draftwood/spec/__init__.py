"""The mathematics of speculation: trees, choices, noise, filters. Sees logits, never a model."""

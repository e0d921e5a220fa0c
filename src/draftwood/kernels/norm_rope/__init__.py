"""The small steps between the products: RMSNorm with its residual, latent norms, rotary positions, KV writes."""

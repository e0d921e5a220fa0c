"""Routed experts in INT4 for few tokens each: gate_up with SwiGLU, down, weighted sum with the shared expert's output."""

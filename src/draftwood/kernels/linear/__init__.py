"""bf16 linear layers for 1..128 rows that stream their weights: every projection of a step that is not an expert's."""

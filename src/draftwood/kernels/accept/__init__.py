"""The target's choice at every verified node, and the walk along the choices that a tree holds."""

"""One family of models: Kimi K2.x and its DFlash drafter."""

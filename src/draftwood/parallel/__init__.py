"""Who holds what, and how ranks talk."""

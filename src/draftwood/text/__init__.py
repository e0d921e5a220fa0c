"""Words in, words out. Never imports torch."""

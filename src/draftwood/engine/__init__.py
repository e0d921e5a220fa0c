"""What happens to a request. Sees token ids, never text."""

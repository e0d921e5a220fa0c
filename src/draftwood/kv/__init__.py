"""Memory of the past: pages and what they hold."""

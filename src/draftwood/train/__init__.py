"""Training of a target, a drafter and a previous-token table."""

"""What the commands of the terminal do."""

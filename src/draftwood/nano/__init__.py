"""The bundled trained model: an ordinary K2 checkpoint folder, its drafter in `draft/`, and their card (README.md)."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder of the bundled checkpoint."""
    return Path(__file__).parent

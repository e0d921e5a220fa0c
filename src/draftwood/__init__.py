"""draftwood: Kimi K2.x inference with DFlash drafts and DDTree verification."""

__version__ = "0.1.0"

"""What the tiers ``triton`` and ``cuda`` do alike."""

"""The ops, one file a stem; see _registry for how one is declared."""

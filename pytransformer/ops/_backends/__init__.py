"""How each tier computes the ops: a folder for each tier, a module for each stem."""

"""How the next token is chosen: controls per sequence, one vectorised pass per step."""

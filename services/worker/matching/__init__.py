"""Constrained decoding: one grammar matcher per sequence, masks of what it allows next, tokens that it forces."""

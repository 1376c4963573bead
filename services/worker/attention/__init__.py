"""Attention backends: one interface, several ways to compute it."""

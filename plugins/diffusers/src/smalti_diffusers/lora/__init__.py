"""Adapters, and the quantised base beneath them."""

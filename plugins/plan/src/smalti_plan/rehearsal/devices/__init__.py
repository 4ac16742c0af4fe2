"""Devices that are not there: torch believes in them, and fake tensors live on them."""

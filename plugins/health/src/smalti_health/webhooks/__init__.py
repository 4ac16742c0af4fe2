"""Webhooks: events of a run, sent to HTTP endpoints by a process of their own."""

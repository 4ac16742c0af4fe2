"""Health of GPUs, and webhooks, as plugins of smalti."""

"""Drafts of configurations: form, TOML and flags, check, save, import."""

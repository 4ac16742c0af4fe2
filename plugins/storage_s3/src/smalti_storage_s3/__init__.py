"""Datasets on S3 for smalti. `client` is the storage; the other modules are what the plugin registers."""

"""The listing of one dataset in ranges of keys, by all ranks."""

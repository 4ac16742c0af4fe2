"""Which rows of a dataset are in which bucket, and what becomes of buckets that cannot fill a batch."""

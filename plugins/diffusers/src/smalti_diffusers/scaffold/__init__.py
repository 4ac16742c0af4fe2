"""A family of a third party for a published pipeline: what is read from it, the package that is written, and its test."""

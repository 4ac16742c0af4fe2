"""Scans and encodings on a Ray cluster: `smalti dataset scan` and `smalti cache encode` with --engine=ray."""

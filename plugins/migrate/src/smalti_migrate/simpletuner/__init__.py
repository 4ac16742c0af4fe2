"""What becomes of SimpleTuner's options here: a table of its keys, and the translation of its files."""

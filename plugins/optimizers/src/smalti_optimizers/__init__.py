"""Adafactor, AdamW in 8 bits, CAME, Lion, Prodigy and StableAdamW for smalti. Importing this imports no torch."""

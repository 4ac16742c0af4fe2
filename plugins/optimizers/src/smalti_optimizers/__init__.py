"""AdamW in 8 bits, Lion, Prodigy and StableAdamW for smalti. Importing this imports no torch."""

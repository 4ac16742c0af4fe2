"""DeepSpeed's ZeRO for smalti. Importing this imports neither torch nor DeepSpeed."""

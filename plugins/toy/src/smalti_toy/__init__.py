"""The toy family for smalti: a small diffusion transformer on pixels. Importing this imports no torch."""

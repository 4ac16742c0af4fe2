"""Model families for smalti from diffusers."""

"""`smalti config new`: a configuration for a model, a card and a goal."""

"""Metadata sources other than the folder itself: tables of captions, archives of images, datasets of the Hub."""

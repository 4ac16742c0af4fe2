"""Images of a list of URLs, downloaded into a folder."""

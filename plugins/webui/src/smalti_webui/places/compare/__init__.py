"""Several runs beside each other: curves, differences of configuration, images."""

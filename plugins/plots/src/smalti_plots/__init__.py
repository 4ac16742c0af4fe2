"""The loss plot of a smalti run, and the contact sheet of its validation images. Importing this imports no matplotlib."""

"""The loss plot of a smalti run, the contact sheet of its validation images, trackers. Importing it imports no matplotlib."""

"""The application: settings, safety, templates, and commands that run as processes."""

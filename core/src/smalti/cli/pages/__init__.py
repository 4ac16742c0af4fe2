"""Pages that are generated from the code: help, options, protocols."""

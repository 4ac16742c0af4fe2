"""What tests share: processes that start at once, runs in them, pages of the docs, checkpoints and their damage."""

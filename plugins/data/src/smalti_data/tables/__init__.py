"""Tables of captions and sizes, joined with the files of a storage."""

"""Names, files and defaults of other trainers: what they become here."""

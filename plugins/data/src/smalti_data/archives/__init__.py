"""Images that are parts of larger files: tar shards, rows of parquet files, datasets of the Hub."""

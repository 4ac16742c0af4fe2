"""Tables, lists of URLs, tar shards, parquet files and the Hugging Face Hub as datasets. Importing this imports no pyarrow."""

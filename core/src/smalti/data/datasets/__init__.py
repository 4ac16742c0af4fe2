"""What a user says of datasets: specification, sources, captions."""

"""The checks that wait for a GPU: `make gpu-day` runs them, `gpuday.table` lists them, and a report says what was found."""

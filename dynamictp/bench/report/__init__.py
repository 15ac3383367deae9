"""A benchmark as a table on the terminal and as one HTML page that needs nothing else."""

"""Files: whole or not there, small ones that others wrote, checksums, rows of results."""

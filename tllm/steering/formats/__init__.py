"""File formats that hold steering vectors, one a file."""

"""`app report`: one HTML file."""

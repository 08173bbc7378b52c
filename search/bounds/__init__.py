"""Below which time no strategy comes."""

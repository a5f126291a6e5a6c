"""Trees for people to read: the repr, HTML in notebooks, and summary tables."""

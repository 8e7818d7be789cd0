"""open_lm's model shapes, one JSON file a name."""

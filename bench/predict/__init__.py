"""What formulas say of a run before, or beside, its measurement. Never imports torch."""

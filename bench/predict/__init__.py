"""Predictions of memory and time by formulas, before or next to a measurement. Never imports torch."""

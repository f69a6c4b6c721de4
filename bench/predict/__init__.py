"""Predictions of memory and time from formulas, used before a measurement or compared with it. This package never
imports torch."""

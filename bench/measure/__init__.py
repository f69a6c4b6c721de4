"""How a number is made: clock, window, memory, collectives, environment."""

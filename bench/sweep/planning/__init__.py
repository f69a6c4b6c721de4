"""From what a user asks to checked points: of a sweep, of a single run, of a prediction. Nothing starts here."""

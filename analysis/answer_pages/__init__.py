"""The pages of `zeroscale predict` and `zeroscale advise`: what they answer as pictures and tables, with the report's
style sheet, and no script."""

"""zeroscale's analysis: from records to tables, pictures and answers. Imports neither torch nor Hydra."""

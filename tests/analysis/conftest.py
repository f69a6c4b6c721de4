"""Makes `records` importable for tests in the folders below, because pytest adds the folder of a conftest to the
path."""

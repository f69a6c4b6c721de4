"""Here so that the tests in the folders below find `records`: pytest puts a conftest's folder on the path."""

"""Pytest adds the folder of this file to the import path, so that tests in subfolders can import `records`."""

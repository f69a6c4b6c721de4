"""A report in a browser's window."""

from typing import NamedTuple

from playwright.sync_api import Page


class Opened(NamedTuple):
    """A page, and what it has asked for and complained about so far."""

    page: Page
    requests: list[str]
    complaints: list[str]

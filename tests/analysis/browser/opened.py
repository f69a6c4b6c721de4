"""A report that is open in a browser window."""

from typing import NamedTuple

from playwright.sync_api import Page


class Opened(NamedTuple):
    """A browser page, with the network requests and error messages that it has produced so far."""

    page: Page
    requests: list[str]
    errors: list[str]

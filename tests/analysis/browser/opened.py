"""A report opened in a browser window."""

from typing import NamedTuple

from playwright.sync_api import Page


class Opened(NamedTuple):
    """A page, with its requests and error messages so far."""

    page: Page
    requests: list[str]
    complaints: list[str]

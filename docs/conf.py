"""How Sphinx makes a site of the pages: `make docs`. Pages are Markdown, and every link in them is checked."""

project = "zeroscale"
extensions = ["myst_parser"]
exclude_patterns = ["_site", "generate"]
html_theme = "furo"  # brings its own styles and scripts, and fetches nothing
html_title = "zeroscale"
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 3
nitpicky = True

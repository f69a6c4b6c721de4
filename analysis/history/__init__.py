"""How configurations became faster or slower over commits, versions or dates, and where their level changed.

series  the places in their order, the values of each configuration there, and the changes of their level
output  text, tables and a page
"""

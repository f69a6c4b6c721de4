"""How configurations became faster or slower over commits, versions or dates, and where their level changed.

axis    the places of a history in their order: what a run was of, when it ran
series  the values of each configuration at these places, and the changes of their level
table   the changes and the values as rows, exact
text    what the terminal shows
page    one page that opens offline
"""

"""The HTML report of a run: `page.page` renders what `facts.read_facts` found in its folder.

The page is one static file without scripts. Plots are SVG written here, not by a library: they follow the
reader's colour scheme (light, dark, print), their text remains text, the page needs no extra package, and no
run waits at its end for a plotting library to be imported.
"""

"""A run as one page of HTML: `page.write` draws what `facts.read_facts` found in its folder.

The page is one static file without scripts. Plots are SVG written here, not by a library: they follow the
reader's colours (light, dark, print), their text stays text, the page needs no extra, and no run waits for a
plotting library to load at its end.
"""

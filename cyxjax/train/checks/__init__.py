"""The checks of a run before its first step; `order.py` calls them."""

"""One command a file: words in, a room called."""

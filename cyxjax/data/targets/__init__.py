"""Targets as people have them: words, categories, yes and no, one-hot rows; made into labels."""

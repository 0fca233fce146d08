"""Pretrained weights: files of other libraries, and matching of names. Nothing in them is executed."""

"""Figures and a page about a data set as a model sees it: see `scripts/data_stats.py`."""

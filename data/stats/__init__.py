"""What a data set gives a model, in figures and on a page: see `scripts/data_stats.py`."""

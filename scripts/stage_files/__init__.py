"""Parts of scripts/stage.py: processes that copy, a lock for each node, and a record of the files that are there."""

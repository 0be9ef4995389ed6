"""Parts of scripts/stage.py: child processes that copy, a lock of the node, a record of what is there."""

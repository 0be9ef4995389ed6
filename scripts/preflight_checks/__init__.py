"""Parts of scripts/preflight.py: reading an sbatch script, checking this host, and messages between the nodes."""

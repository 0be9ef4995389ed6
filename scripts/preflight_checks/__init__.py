"""Parts of scripts/preflight.py: an sbatch script's command, this host, what the nodes say to each other."""

"""What `ddpobs run` puts into the processes of an unchanged script: `sitecustomize`, found first on PYTHONPATH."""

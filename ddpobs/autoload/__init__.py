"""Code that `ddpobs run` loads into an unchanged script: `sitecustomize`, the first one on PYTHONPATH."""

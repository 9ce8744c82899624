"""One file per finding; `registry.py` lists them all."""

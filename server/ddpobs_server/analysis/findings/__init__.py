"""One file a finding; `registry.py` lists them all."""

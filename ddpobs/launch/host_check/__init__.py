"""`ddpobs check-hosts`: every rank measures its host before the script begins, and a slow host stops the launch."""

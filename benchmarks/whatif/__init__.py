"""Predict steps after a change from one measured setting, then measure them."""

"""Tools for the operator: commands, self-check, backup, retention, health metrics and logs."""

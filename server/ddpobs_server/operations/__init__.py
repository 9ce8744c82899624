"""Everything an operator runs: commands, checks, backups, retention, health and logs."""

"""The database itself: connections, locks, errors, migrations and the form of its statements."""

"""HTTP around the routes: authentication, problems, protocol limits and headers."""

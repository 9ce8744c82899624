"""Steps as a Chrome trace."""

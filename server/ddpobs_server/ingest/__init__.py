"""A batch comes in; its acknowledgement goes out after commit."""

"""A small shop: it had its own tables and history before it got a job queue."""

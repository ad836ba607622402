"""The HTTP ingress of callbacks, against a real database."""

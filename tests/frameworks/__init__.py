"""The library with what applications use: their sessions, their models, their fixtures, unchanged."""

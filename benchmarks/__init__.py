"""Measurements of hvd_compress: programs that write JSON, and pictures of it."""

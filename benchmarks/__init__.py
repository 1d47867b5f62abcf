"""Measurements of hvd_compress: programs that write JSON records, and draw them."""

"""The common parts of the PyTorch frontends, whatever sends their messages: records, residuals, coding."""

"""What every PyTorch frontend needs, whatever sends its messages: records, residuals, coding."""

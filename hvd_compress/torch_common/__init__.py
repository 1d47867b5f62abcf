"""What every PyTorch frontend needs, whoever sends the messages: records, residuals, coding."""

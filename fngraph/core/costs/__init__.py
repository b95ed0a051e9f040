"""What steps and keys take, in time: measured constants, predicted steps, planned sizes."""
